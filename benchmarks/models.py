"""Training steps of whole models under torch.compile: time, memory, launches and bits, beside other backends.

    python -m benchmarks.models                              # on the GPU if there is one
    python -m benchmarks.models --model llama resnet50 --contestant eager fuser
    python -m benchmarks.models --quick                      # small sizes, a smoke test

Configurations of transformers and timm, with random weights; bfloat16 unless told. A step is forward, loss and
backward; the optimizer is not part of it. Writes benchmarks/results/models_DEVICE.json.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fuser
from benchmarks.environment import describe_environment
from benchmarks.report import write_json
from benchmarks.sweep import hide_paths

RESULTS = Path(__file__).resolve().parent / "results"
SCHEMA = 1
GIB = 1 << 30
_library = torch.library.Library("torchvision", "FRAGMENT")

# How each contestant compiles a model; None: not at all.
CONTESTANTS: dict[str, Mapping[str, Any] | None] = {
    "eager": None,
    "aot_eager": {"backend": "aot_eager"},
    "inductor": {"backend": "inductor"},
    "inductor cuda graphs": {"backend": "inductor", "mode": "reduce-overhead"},
    "fuser": {"backend": "fuser"},
    "fuser cuda graphs": {"backend": "fuser", "mode": "reduce-overhead"},
}
USUAL = ("eager", "aot_eager", "inductor", "fuser")


@dataclass(frozen=True, slots=True)
class Case:
    """One model, in a real size and in a small one."""

    make: Callable[[bool], nn.Module]
    inputs: Callable[[bool, torch.device], dict[str, Any]]
    channels_last: bool = False


def tokens(batch: int, length: int, vocabulary: int) -> Callable[[bool, torch.device], dict[str, Any]]:
    """Return what draws token ids."""

    def draw(quick: bool, device: torch.device) -> dict[str, Any]:
        shape = (2, 32) if quick else (batch, length)
        return {"input_ids": torch.randint(0, 500 if quick else vocabulary, shape, device=device)}

    return draw


def pictures(batch: int, size: int = 224, name: str = "x") -> Callable[[bool, torch.device], dict[str, Any]]:
    """Return what draws pictures."""

    def draw(quick: bool, device: torch.device) -> dict[str, Any]:
        shape = (2, 3, 64, 64) if quick else (batch, 3, size, size)
        return {name: torch.randn(shape, device=device)}

    return draw


def language_model(model: str, config: str, **sizes: Any) -> Callable[[bool], nn.Module]:
    """Return what makes a language model of transformers."""

    def make(quick: bool) -> nn.Module:
        import transformers

        small = {"vocab_size": 500}
        for name in ("num_hidden_layers", "n_layer", "num_layers"):
            small |= {name: 2} if name in sizes else {}
        settings = getattr(transformers, config)(**{**sizes, **(small if quick else {})})
        settings.use_cache = False
        made: nn.Module = getattr(transformers, model)(settings)
        return made

    return make


def timm_model(name: str) -> Callable[[bool], nn.Module]:
    """Return what makes a model of timm."""

    def make(quick: bool) -> nn.Module:
        try:
            import timm
        except RuntimeError:
            # A torchvision that is built for another torch has none of its operators: timm names this one.
            _library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            import timm

        sizes = {"img_size": 64} if quick and name.startswith(("vit", "swin")) else {}
        made: nn.Module = timm.create_model(name, pretrained=False, **sizes)
        return made

    return make


_LLAMA = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 6, "num_attention_heads": 16,
    "num_key_value_heads": 4, "vocab_size": 32000,
}  # fmt: skip
_GPT2 = {"n_embd": 1024, "n_layer": 6, "n_head": 16, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_BERT = {"num_hidden_layers": 6, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CASES: dict[str, Case] = {
    "llama": Case(language_model("LlamaForCausalLM", "LlamaConfig", **_LLAMA), tokens(4, 1024, 32000)),
    "gpt2": Case(language_model("GPT2LMHeadModel", "GPT2Config", **_GPT2), tokens(8, 1024, 50257)),
    "bert": Case(language_model("BertForMaskedLM", "BertConfig", **_BERT), tokens(16, 512, 30522)),
    "vit": Case(timm_model("vit_base_patch16_224"), pictures(64)),
    "resnet50": Case(timm_model("resnet50"), pictures(64), channels_last=True),
    "convnext": Case(timm_model("convnext_tiny"), pictures(64)),
}


def main() -> None:
    """Run, print a line for each model and contestant, and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__)
    parser.add_argument("--model", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--contestant", nargs="+", choices=CONTESTANTS, default=list(USUAL))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    environment = describe_environment(device)
    document: dict[str, Any] = {"schema": SCHEMA, "environment": environment, "records": []}
    name = environment["device"]["name"].split()[-1].lower() if device.type == "cuda" else "cpu"
    path = options.out or RESULTS / f"models_{name}.json"
    for model in options.model:
        measured = measure_model(model, options, device)
        document["records"].append({"model": model, "dtype": options.dtype, "contestants": measured})
        write_json(document, path)


def measure_model(name: str, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Measure a model under each contestant; the bits of the others are compared with aot_eager's."""
    case, dtype = CASES[name], getattr(torch, options.dtype)
    torch.manual_seed(0)
    model = case.make(options.quick).to(device, dtype).train()
    if case.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    inputs = {
        key: value.to(dtype) if value.is_floating_point() else value
        for key, value in case.inputs(options.quick, device).items()
    }
    if case.channels_last:
        inputs = {key: value.to(memory_format=torch.channels_last) for key, value in inputs.items()}
    wanted: list[torch.Tensor] | None = None
    measured: dict[str, Any] = {}
    for contestant in sorted(options.contestant, key="aot_eager".__ne__):
        try:
            record, results = measure_steps(model, inputs, CONTESTANTS[contestant], options.steps, device)
        except Exception as error:  # a peer that fails is a result
            measured[contestant] = {"error": hide_paths(f"{type(error).__name__}: {error}")[:300]}
        else:
            wanted = results if contestant == "aot_eager" else wanted
            if wanted is not None and contestant != "aot_eager":
                pairs = list(zip(results, wanted, strict=True))
                record["tensors_that_differ"] = sum(not torch.equal(got, want) for got, want in pairs)
                record["tensors"] = len(pairs)
            measured[contestant] = record
        print(f"{name:10} {contestant:22} {measured[contestant]}", flush=True)
        gc.collect()
    return measured


def measure_steps(
    model: nn.Module, inputs: Mapping[str, Any], how: Mapping[str, Any] | None, steps: int, device: torch.device
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Return what steps of a copy of the model cost, and its output and gradients after the first."""
    torch._dynamo.reset()
    own = copy.deepcopy(model)
    called = own if how is None else torch.compile(own, **how)

    def step() -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        result = called(**inputs)
        output: torch.Tensor = result if isinstance(result, torch.Tensor) else result[0]
        output.float().square().mean().backward()
        return output

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    # Its bits, where torch's own kernels have the same in each run; then all is compiled once more.
    torch.use_deterministic_algorithms(True, warn_only=True)
    began = time.perf_counter()
    output = step()
    wait()
    first = time.perf_counter() - began
    torch.use_deterministic_algorithms(False)
    results = [output.detach().cpu(), *(item.grad.cpu() for item in own.parameters() if item.grad is not None)]
    del output
    for _ in range(3):
        own.zero_grad(set_to_none=True)
        step()
    wait()
    record: dict[str, Any] = {"first_step_s": round(first, 2)}
    if device.type == "cuda":
        gc.collect()
        own.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        wait()
        record["peak_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 3)
        record["held_gib"] = round(before / GIB, 3)
    samples = []
    for _ in range(steps):
        own.zero_grad(set_to_none=True)
        wait()
        began = time.perf_counter()
        step()
        wait()
        samples.append(1e3 * (time.perf_counter() - began))
    record["step_ms"] = round(statistics.median(samples), 3)
    if device.type == "cuda":
        own.zero_grad(set_to_none=True)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            step()
            wait()
        events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        record["gpu_ms"] = round(sum(event.self_device_time_total for event in events) / 1e3, 3)
        record["launches"] = len(events)
        record["copies"] = sum("Memcpy" in event.name for event in events)
    record["fuser_launches"] = fuser.stats()["launches"]
    return record, results


if __name__ == "__main__":
    main()
