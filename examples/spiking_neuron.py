"""Train spiking neurons: a step whose derivative is zero nearly everywhere gets a hand-written surrogate gradient.

A leaky integrate-and-fire neuron adds its input to its voltage, which leaks away, and emits a spike when the voltage
passes a threshold, by which it then falls. A spike is 0 or 1, so its true derivative teaches nothing. In its place
stands the derivative of a smooth curve, 1 / (1 + 5 |u - threshold|)^2, as in F. Zenke and S. Ganguli, "SuperSpike"
(2018). Here this is done in two ways, which must agree:

- ``lif``: one functor with two outputs, and ``jit_fn(backward=)`` with a functor that makes both gradients;
- ``lif_in_parts``: only the spike's derivative is written by hand (``fuser.differentiable``), and ``fuser.fuse`` joins
  it with the rest, whose derivative is derived.

Run it with ``python examples/spiking_neuron.py``. The task is to tell early bursts of input spikes from late ones. It
ends with an error unless the loss falls to a third and nearly all of the test bursts are told apart.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

import fuser

STEPS, INPUTS, HIDDEN, CLASSES = 24, 20, 32, 2
LEAK, THRESHOLD = 0.9, 1.0
CONSTANTS = {"leak": LEAK, "threshold": THRESHOLD}

# --- the neuron ---------------------------------------------------------------------------------

# Called with the saved tensors (all inputs, unless save_for_backward chooses), then the gradient of each output.
lif_backward = fuser.jit_fn(
    """
template <typename T>
void lif_backward(T voltage, T current, T grad_spike, T grad_next, T leak, T threshold,
                  T& grad_voltage, T& grad_current) {
  const T root = T(1) + T(5) * std::fabs(leak * voltage + current - threshold);
  grad_current = grad_next + (grad_spike - threshold * grad_next) / (root * root);
  grad_voltage = leak * grad_current;
}""",
    num_outputs=2,
    scalars=CONSTANTS,
)

lif = fuser.jit_fn(
    """
template <typename T>
void lif(T voltage, T current, T leak, T threshold, T& spike, T& next) {
  const T u = leak * voltage + current;
  spike = u > threshold ? T(1) : T(0);
  next = u - threshold * spike;
}""",
    num_outputs=2,
    scalars=CONSTANTS,
    backward=lif_backward,
)

fire = fuser.differentiable(
    fuser.jit_fn(
        "template <typename T> T fire(T u, T threshold) { return u > threshold ? T(1) : T(0); }",
        scalars={"threshold": THRESHOLD},
    ),
    fuser.jit_fn(
        """
template <typename T> T fire_backward(T u, T grad, T threshold) {
  const T root = T(1) + T(5) * std::fabs(u - threshold);
  return grad / (root * root);
}""",
        scalars={"threshold": THRESHOLD},
    ),
    save_for_backward=["u"],
    num_grad_inputs=1,
)


@fuser.fuse
def lif_in_parts(voltage: Tensor, current: Tensor) -> tuple[Tensor, Tensor]:
    """Return the spikes and the voltages after them, as ``lif`` does."""
    u = LEAK * voltage + current
    spike = fire(u)
    return spike, u - THRESHOLD * spike


# --- the network --------------------------------------------------------------------------------


class Network(nn.Module):
    """Input spikes, a layer of spiking neurons, and voltages that are read out without spikes."""

    def __init__(self, step: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.step = step
        self.enter = nn.Linear(INPUTS, HIDDEN)
        self.leave = nn.Linear(HIDDEN, CLASSES, bias=False)

    def forward(self, spikes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the classes' scores (n, classes) for spikes (steps, n, inputs), and the neurons' mean rate."""
        currents = self.enter(spikes)
        voltage = torch.zeros_like(currents[0])
        total, emitted = torch.zeros_like(voltage), torch.zeros_like(voltage)
        for current in currents:
            spike, voltage = self.step(voltage, current)
            # What comes early counts for less: it has leaked away.
            total = LEAK * total + spike
            emitted = emitted + spike
        return self.leave(total), emitted.detach().mean() / STEPS


def make_bursts(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return spikes (steps, n, inputs) and labels: 0 for bursts in the first half of the time, 1 for the second half.

    Both have the same number of spikes, on average, and noise all the time.
    """
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    middle = 6 + 12 * labels + torch.randint(-2, 3, (count,), generator=generator)
    time_steps = torch.arange(STEPS)[:, None]
    rate = 0.05 + 0.5 * ((time_steps - middle).abs() <= 2)
    spikes = torch.rand(STEPS, count, INPUTS, generator=generator) < rate[..., None]
    return spikes.float(), labels


def train(network: Network, spikes: Tensor, labels: Tensor) -> tuple[float, float]:
    """Train in place; return the first and the last loss."""
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    losses = []
    for epoch in range(1, 31):
        scores, rate = network(spikes)
        loss = functional.cross_entropy(scores, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if epoch == 1 or epoch % 10 == 0:
            print(f"epoch {epoch:3d}   loss {losses[-1]:.4f}   {float(rate):.3f} spikes per neuron and step")
    return losses[0], losses[-1]


def gradients(step: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], spikes: Tensor, labels: Tensor) -> Tensor:
    """Return the gradients of a fresh network's weights, as one vector."""
    torch.manual_seed(0)
    network = Network(step).to(spikes.device)
    functional.cross_entropy(network(spikes)[0], labels).backward()
    return torch.cat([parameter.grad.flatten() for parameter in network.parameters() if parameter.grad is not None])


def main() -> int:
    """Compare the two ways, train and print; return the exit code."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    spikes, labels = (item.to(device) for item in make_bursts(256, seed=1))
    unseen, answers = (item.to(device) for item in make_bursts(256, seed=2))

    one, other = gradients(lif, spikes, labels), gradients(lif_in_parts, spikes, labels)
    apart = float((one - other).norm() / one.norm())
    print(f"the gradients of the two ways differ by {apart:.1e}")

    fuser.reset_stats()
    torch.manual_seed(0)
    network = Network(lif).to(device)
    began = time.perf_counter()
    first, last = train(network, spikes, labels)
    seconds = time.perf_counter() - began
    stats = fuser.stats()
    with torch.no_grad():
        accuracy = float((network(unseen)[0].argmax(-1) == answers).double().mean())

    print(f"trained in {seconds:.1f} s")
    print(f"launches     {stats['launches']}, two for each of 30 x {STEPS} steps: forward and backward")
    print(f"fallbacks    {sum(stats['fallbacks'].values())}")
    print(f"loss         {first:.4f} -> {last:.4f}")
    print(f"accuracy     {accuracy:.1%} of the bursts it has not seen")
    passed = apart < 1e-4 and last < first / 3 and accuracy > 0.95 and not stats["fallbacks"]
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
