"""Develop a photograph with seven C++ functors in one launch.

Each step of the development is a small jiterator functor. ``develop_step_by_step`` calls them
one after another, one launch per call; ``develop`` is the same function under ``fuser.fuse``,
which runs the whole chain as one kernel and returns the same bits.

Run it with ``make demo`` or ``python examples/photo.py --help``.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import fuser

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    from torch import Tensor

OUTPUT = Path(__file__).resolve().parent / "output"

# --- the functors -------------------------------------------------------------------------------

srgb_to_linear = fuser.create_jit_fn("""
template <typename T> T srgb_to_linear(T v) {
  return v <= T(0.04045) ? v / T(12.92) : pow((v + T(0.055)) / T(1.055), T(2.4));
}""")

white_balance = fuser.create_jit_fn("""
template <typename T> T white_balance(T light, T gain) {
  return light * gain;
}""")

exposure = fuser.create_jit_fn(
    """
template <typename T> T exposure(T light, T stops) {
  return light * exp2(stops);
}""",
    stops=0.0,
)

# The natural fall-off of a lens: cos^4 of the angle to its axis, from the pixel's position.
vignette = fuser.create_jit_fn(
    """
template <typename T> T vignette(T light, T row, T col, T strength) {
  T tan2 = strength * (row * row + col * col);
  T cos2 = T(1) / (T(1) + tan2);
  return light * cos2 * cos2;
}""",
    strength=0.0,
)

# K. Narkowicz's rational fit of the ACES film curve.
filmic = fuser.create_jit_fn("""
template <typename T> T filmic(T x) {
  T up = x * (T(2.51) * x + T(0.03));
  T down = x * (T(2.43) * x + T(0.59)) + T(0.14);
  return up / down;
}""")

saturation = fuser.create_multi_output_jit_fn(
    """
template <typename T> T mix(T from, T to, T amount) { return from + amount * (to - from); }

template <typename T>
void saturation(T r, T g, T b, T amount, T& out_r, T& out_g, T& out_b) {
  T luma = T(0.2126) * r + T(0.7152) * g + T(0.0722) * b;
  out_r = mix(luma, r, amount);
  out_g = mix(luma, g, amount);
  out_b = mix(luma, b, amount);
}""",
    num_outputs=3,
    amount=1.0,
)

linear_to_srgb = fuser.create_jit_fn("""
template <typename T> T linear_to_srgb(T light) {
  T v = light < T(0) ? T(0) : light > T(1) ? T(1) : light;
  return v <= T(0.0031308) ? v * T(12.92) : T(1.055) * pow(v, T(1) / T(2.4)) - T(0.055);
}""")

STEPS = (
    "sRGB to linear",
    "white balance",
    "exposure",
    "vignette",
    "filmic curve",
    "saturation",
    "linear to sRGB",
)

# --- the development ----------------------------------------------------------------------------


def develop_step_by_step(
    r: Tensor,
    g: Tensor,
    b: Tensor,
    gain_r: Tensor,
    gain_g: Tensor,
    gain_b: Tensor,
    row: Tensor,
    col: Tensor,
    stops: float,
    strength: float,
    amount: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Develop three colour planes of shape (H, W), values in 0..1.

    The gains have shape (1, 1), ``row`` (H, 1) and ``col`` (1, W): they broadcast.
    """

    def expose(plane: Tensor, gain: Tensor) -> Tensor:
        light = white_balance(srgb_to_linear(plane), gain)
        light = exposure(light, stops=stops)
        light = vignette(light, row, col, strength=strength)
        return filmic(light)

    r, g, b = saturation(expose(r, gain_r), expose(g, gain_g), expose(b, gain_b), amount=amount)
    return linear_to_srgb(r), linear_to_srgb(g), linear_to_srgb(b)


develop = fuser.fuse(develop_step_by_step)


def develop_eager(
    r: Tensor,
    g: Tensor,
    b: Tensor,
    gain_r: Tensor,
    gain_g: Tensor,
    gain_b: Tensor,
    row: Tensor,
    col: Tensor,
    stops: float,
    strength: float,
    amount: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Do the same in plain torch operations, plane by plane too."""

    def expose(plane: Tensor, gain: Tensor) -> Tensor:
        light = torch.where(plane <= 0.04045, plane / 12.92, ((plane + 0.055) / 1.055) ** 2.4)
        light = light * gain
        light = light * 2.0**stops
        cos2 = 1.0 / (1.0 + strength * (row * row + col * col))
        light = light * cos2 * cos2
        return light * (2.51 * light + 0.03) / (light * (2.43 * light + 0.59) + 0.14)

    def encode(light: Tensor) -> Tensor:
        v = light.clamp(0.0, 1.0)
        return torch.where(v <= 0.0031308, v * 12.92, 1.055 * v ** (1.0 / 2.4) - 0.055)

    r, g, b = expose(r, gain_r), expose(g, gain_g), expose(b, gain_b)
    luma = 0.2126 * r + 0.7152 * g + 0.0722 * b
    r, g, b = (luma + amount * (colour - luma) for colour in (r, g, b))
    return encode(r), encode(g), encode(b)


# --- the photograph -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Photo:
    """A photograph on a device, with what the development needs to know about it."""

    # (3, H, W) float32, 0..1
    image: Tensor
    # (3, 1, 1): undoes the warm light of the scene
    gains: Tensor
    # (H, 1) and (1, W): the distance from the optical axis, 1 at half the diagonal
    row: Tensor
    col: Tensor

    def arguments(self) -> dict[str, Tensor]:
        """Return the tensor arguments of ``develop``, by name."""
        planes = dict(zip(("r", "g", "b"), self.image.unbind(0), strict=True))
        gains = dict(zip(("gain_r", "gain_g", "gain_b"), self.gains.unbind(0), strict=True))
        return {**planes, **gains, "row": self.row, "col": self.col}


def load_photo(megapixels: float, device: torch.device) -> Photo:
    """Load the photograph that ships with scikit-image, enlarged to about ``megapixels``."""
    from skimage import data

    pixels = torch.from_numpy(data.coffee()).permute(2, 0, 1).to(device, torch.float32) / 255
    height, width = pixels.shape[1:]
    scale = math.sqrt(megapixels * 1e6 / (height * width))
    height, width = (max(16, round(side * scale / 16) * 16) for side in (height, width))
    image = torch.nn.functional.interpolate(pixels[None], size=(height, width), mode="bicubic", align_corners=False)[0]
    half_diagonal = math.hypot(height, width) / 2
    row = (torch.arange(height, device=device) - (height - 1) / 2) / half_diagonal
    col = (torch.arange(width, device=device) - (width - 1) / 2) / half_diagonal
    gains = torch.tensor([0.97, 1.0, 1.13], device=device)
    return Photo(image.clamp(0, 1).contiguous(), gains[:, None, None], row[:, None], col[None, :])


# --- measuring ----------------------------------------------------------------------------------


def median_times_ms(
    runs: Mapping[str, Callable[[], Any]], device: torch.device, budget_s: float = 6.0
) -> dict[str, float]:
    """Return the median time of each run, after a warm-up.

    The runs take turns, so that a busy neighbour on the machine slows all of them alike.
    """
    for run in runs.values():
        run()
    samples: dict[str, list[float]] = {name: [] for name in runs}
    began = time.perf_counter()
    rounds = 0
    while rounds < 5 or (time.perf_counter() - began < budget_s and rounds < 200):
        for name, run in runs.items():
            samples[name].append(time_once_ms(run, device))
        rounds += 1
    return {name: statistics.median(times) for name, times in samples.items()}


def time_once_ms(run: Callable[[], Any], device: torch.device) -> float:
    """Time one call: on the device's own clock for CUDA, on the wall clock otherwise."""
    if device.type != "cuda":
        began = time.perf_counter()
        run()
        return (time.perf_counter() - began) * 1e3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def count_launches(run: Callable[[], Any]) -> int:
    """Return how many kernels fuser launches in one call."""
    fuser.reset_stats()
    run()
    return int(fuser.stats()["launches"])


def describe_device(device: torch.device) -> str:
    """Return the device's name, as people know it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


def cpu_name() -> str:
    """Return the processor's model name, or ``CPU`` where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "CPU"
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "CPU")


# --- showing ------------------------------------------------------------------------------------


def print_kernel(source: str, device: torch.device) -> None:
    """Save the kernel's text, and print what it does for each element: one line for each functor."""
    lines = source.rstrip().splitlines()
    path = OUTPUT / ("photo_kernel.cu" if device.type == "cuda" else "photo_kernel.cpp")
    path.write_text(source, encoding="utf-8")
    print(f"\nThe generated kernel has {len(lines)} lines, in {relative(path)}. For each element it does:")
    print("\n".join(line for line in lines if line.startswith("  // v")))


def relative(path: Path) -> Path:
    """Return ``path`` as seen from the project's root."""
    return path.relative_to(OUTPUT.parent.parent)


def save_pictures(before: Tensor, after: Tensor) -> Path:
    """Save the photograph before and after, side by side, and return the file's path."""
    plt = load_pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.25), layout="constrained")
    titles = ("before", f"after {len(STEPS)} functors in one launch")
    for axis, image, title in zip(axes, (before, after), titles, strict=True):
        axis.imshow(to_pixels(image))
        axis.set_title(title, fontsize=12)
        axis.axis("off")
    path = OUTPUT / "photo.png"
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)
    return path


def to_pixels(image: Tensor, width: int = 900) -> np.ndarray:
    """Return a (3, H, W) image in 0..1 as 8-bit pixels of shape (h, width, 3)."""
    height = round(image.shape[1] * width / image.shape[2])
    small = torch.nn.functional.interpolate(image[None], size=(height, width), mode="area")[0]
    return (small * 255).round().clamp(0, 255).byte().permute(1, 2, 0).cpu().numpy()


def save_times(times_ms: Mapping[str, float], title: str) -> Path:
    """Save a bar chart of the time of one call, and return the file's path."""
    plt = load_pyplot()
    names, values = list(times_ms), list(times_ms.values())
    figure, axis = plt.subplots(figsize=(9, 2.9), layout="constrained")
    colours = ["#9aa5b1"] * (len(values) - 1) + ["#d9622b"]
    bars = axis.barh(names, values, color=colours, height=0.62)
    fastest = values[-1]
    labels = [f"{v:,.{0 if v >= 100 else 2}f} ms" + (f"  ({v / fastest:.1f}x)" if v != fastest else "") for v in values]
    axis.bar_label(bars, labels, padding=5, fontsize=10)
    axis.set_xlim(0, max(values) * 1.22)
    axis.invert_yaxis()
    axis.set_xlabel("time of one call, milliseconds (median; shorter is better)")
    axis.set_title(title, fontsize=11, loc="left")
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(axis="y", length=0, labelsize=10)
    path = OUTPUT / "photo_times.png"
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def load_pyplot() -> Any:
    """Import matplotlib, drawing to files."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt


# --- the demo -----------------------------------------------------------------------------------


def run_demo(device: torch.device, megapixels: float, *, plots: bool, is_size_given: bool) -> bool:
    """Run, print and save everything; return whether chaining kept every bit."""
    OUTPUT.mkdir(parents=True, exist_ok=True)
    photo = load_photo(megapixels, device)
    arguments = {**photo.arguments(), "stops": -0.1, "strength": 0.4, "amount": 0.95}

    def chained() -> tuple[Tensor, ...]:
        return develop(**arguments)

    def one_by_one() -> tuple[Tensor, ...]:
        return develop_step_by_step(**arguments)

    def eager() -> tuple[Tensor, ...]:
        return develop_eager(**arguments)

    height, width = photo.image.shape[1:]
    size = f"{height * width / 1e6:.1f} megapixels"
    why = "as --size says" if is_size_given else f"by default on a {'GPU' if device.type == 'cuda' else 'CPU'}; --size"
    print(f"photo    skimage.data.coffee enlarged to {width} x {height}: {size} ({why}), float32")
    print(f"device   {describe_device(device)}")
    print(f"chain    {' > '.join(STEPS)}")

    began = time.perf_counter()
    after = chained()
    synchronize(device)
    first_ms = (time.perf_counter() - began) * 1e3

    group = develop.groups[0]
    inputs = [arguments[item.name] for item in group.inputs]
    print_kernel(fuser.debug_get_fused_kernel_code(group, inputs), device)

    launches = {"before": count_launches(one_by_one), "after": count_launches(chained)}
    equal = all(torch.equal(a, b) for a, b in zip(after, one_by_one(), strict=True))
    far = float((torch.stack(after) - torch.stack(eager())).abs().max())
    # A new setting is a new argument of the same kernel.
    fuser.reset_stats()
    develop(**{**arguments, "stops": 0.5})
    recompiled = int(fuser.stats()["compiles"])

    compiled = compile_eager(arguments)
    runs = {"eager torch": eager, "torch.compile": compiled, "one functor at a time": one_by_one, "chained": chained}
    times_ms = median_times_ms({name: run for name, run in runs.items() if run is not None}, device)
    chained_ms = times_ms["chained"]

    print(f"\nlaunches           {launches['before']} one functor at a time, {launches['after']} chained")
    print(f"first call         {first_ms:.0f} ms, compilation included")
    print(f"another exposure   {recompiled} compilations")
    print("time of one call")
    for name, value in times_ms.items():
        print(f"  {name:<22} {value:9.3f} ms   {value / chained_ms:5.2f}x the chained time")
    print(f"bit equality       chained and one by one are {'equal' if equal else 'NOT EQUAL'}")
    print(f"distance to eager  {far:.1e} at most, {far * 255:.4f} of one 8-bit step")

    if plots:
        title = f"{len(STEPS)} functors on {size}, {describe_device(device)}"
        pictures = save_pictures(photo.image, torch.stack(after)), save_times(times_ms, title)
        print(f"saved              {', '.join(str(relative(path)) for path in pictures)}")
    return equal


def compile_eager(arguments: Mapping[str, Any]) -> Callable[[], Any] | None:
    """Return the plain operations under torch.compile; None, said why, where it cannot compile."""
    compiled = torch.compile(develop_eager)
    try:
        compiled(**arguments)
    except Exception as error:  # whatever it lacks here
        print(f"torch.compile does not work here: {str(error).splitlines()[0]}", file=sys.stderr)
        return None
    return lambda: compiled(**arguments)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run the demo; return the exit code."""
    parser = argparse.ArgumentParser(description="Develop a photograph in one launch.")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--size", type=float, metavar="MEGAPIXELS", help="default: 8 on the CPU, 48 on a GPU")
    parser.add_argument("--no-plots", action="store_true", help="save no pictures")
    options = parser.parse_args(argv)

    gpu = torch.cuda.is_available()
    if options.device == "cuda" and not gpu:
        print("photo.py: --device cuda, but torch finds no CUDA device here", file=sys.stderr)
        return 1
    device = torch.device("cuda" if gpu and options.device != "cpu" else "cpu")
    megapixels = options.size or (48.0 if device.type == "cuda" else 8.0)
    try:
        equal = run_demo(device, megapixels, plots=not options.no_plots, is_size_given=bool(options.size))
    except fuser.errors.CompilerNotFoundError as error:
        print(f"photo.py: no compiler for {device.type} kernels: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        print(
            f"photo.py: the demo needs {error.name}: pip install 'torch-fuser[demo]'",
            file=sys.stderr,
        )
        return 1
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
