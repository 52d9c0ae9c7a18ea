"""From what a machine can do and what a step costs to how the step should run. Pure: nothing is timed.

`plan` makes one `Decision` per question, each with its reason: the device, how the step is captured, the
layout of images, intra-op threads, and the memory left for data. Every function also answers alone. A rate
of 0.0 in `Hardware` means "not measured" and is replaced by a cautious guess, so a plan can always be made;
times are estimates good to a factor of three or so, which is enough to tell a second from a minute.

The constants were measured on one H200 (16 cores) and on a 2-core virtual machine; where one is a guess it
says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headrace.errors import DeviceError, OptionError, unknown
from headrace.types import Accelerator, Decision, Hardware, Plan

CAPTURES = ("auto", "graph", "compile", "chain", "eager")

GUESSED_CORE_FLOPS = 50e9
GUESSED_COPY_BYTES_PER_S = 10e9
GUESSED_DEVICE_FLOPS = 10e12
GEMM_SHARE = 0.4
"""Of the matrix rate that a whole step reaches; a guess between 0.2 (convolutions) and 0.7 (wide layers)."""
GRAPH_S_PER_MODULE = 22e-6
"""H200, batch 64, a step in a CUDA graph: LeNet 0.26 ms over 12 modules, an MLP 0.13 ms over 7."""
COMPILE_S = 9.0
"""An H200 with 16 cores: LeNet's first epoch took 8.7 s with compiling and 1.9 s without, caches empty."""
COMPILE_GAIN = 0.3
"""Share of a captured step that compiling saves: LeNet on an H200 went from 0.26 to 0.18 ms."""
THREAD_WORK_S = 100e-6
"""One-core work per step below which a second thread only waits: on two cores a LeNet step of one example
(0.14 ms by this file's estimate) gained nothing, 16 examples (0.4 ms) gained 1.2 ×, 64 gained 1.6 ×."""
TUNED_UPDATES = 1000  # trying kernels was guessed to take a second; a captured step takes under one ms
PLAIN_CONVOLUTION_FLOPS = 20e6
"""Of one update, below which torch's plain convolutions are at least as fast as oneDNN's. LeNets on images of 8, 28
and 32 pixels, one core of a Sapphire Rapids: 1.55 to 2.25 × as fast at batch 1, 1.2 × at 10e6 operations, even at 13e6
to 20e6, half as fast far above. On two cores of a Zen 5, 28 pixels: 1.4 × at batch 4, 1.1 × at 8, 0.65 × at 16."""
PARAMETER_PASSES = 6
"""How often a step reads or writes each parameter or its gradient: forward, backward, update."""
DEVICE_DATA_SHARE = 0.8
HOST_DATA_SHARE = 0.6
"""Of the free memory, for data; a guess that leaves room for the system and for fragments."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What one run asks of the machine."""

    rows: int
    """Examples in the data."""
    row_bytes: float
    """Bytes of one example as it lies in memory."""
    batch_size: int
    parameter_bytes: int
    modules: int = 1
    """Leaf modules of the model; each is a few kernels."""
    flops_per_row: float = 0.0
    """Forward and backward. When 0, six per parameter, which is true of dense layers."""
    activation_bytes_per_row: float = 0.0
    """What the forward keeps for the backward."""
    optimizer_copies: int = 0
    """Values that the optimizer keeps per parameter: 0 for SGD, 1 with momentum, 2 for Adam."""
    updates: int | None = None
    """How many updates the run will take; None when only a time or a loss ends it."""
    device: str = "auto"
    capture: str = "auto"
    chain: bool = False
    """The model is a chain of dense layers whose step is written by hand."""
    capturable: bool = True
    """No operation of the step reads a value from the device: no sparse input, hooks or plateau inside."""
    convolutions: bool = False
    bf16: bool = False
    deterministic: bool = False

    def __post_init__(self) -> None:
        for name in ("rows", "batch_size"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name}={getattr(self, name)!r}: at least 1 is needed")
        if self.capture not in CAPTURES:
            raise unknown("capture", self.capture, CAPTURES)

    @property
    def flops(self) -> float:
        """Of one update."""
        per_row = self.flops_per_row or 6.0 * (self.parameter_bytes / 4)
        return per_row * self.batch_size


def plan(hardware: Hardware, workload: Workload) -> Plan:
    """Every decision about the step, in the order in which they depend on one another."""
    device = choose_device(hardware, workload)
    decisions = [
        device,
        capture_ladder(hardware, workload)[0],
        choose_convolutions(hardware, workload),
        choose_layout(hardware, workload),
        choose_threads(hardware, workload),
        data_memory(hardware, workload),
    ]
    return Plan(decisions=tuple(decisions))


# ---- the device


def choose_device(hardware: Hardware, workload: Workload) -> Decision:
    """The device asked for if it is there; an accelerator before the cores when the choice is ours."""
    count = len(hardware.accelerators)
    if workload.device == "auto":
        if count:
            return _decide("device", "cuda:0", f"{hardware.accelerators[0].name} is there")
        return _decide("device", "cpu", "no accelerator was found")
    kind, _, number = workload.device.partition(":")
    if kind == "cpu" and not number:
        return _decide("device", "cpu", "asked for")
    if kind != "cuda" or not (number.isdigit() or not number):
        raise DeviceError(
            f"device={workload.device!r} is none that can be used; say auto, cpu, cuda or cuda:0"
        )
    index = int(number or 0)
    if index >= count:
        there = ", ".join(f"cuda:{n}" for n in range(count)) or "none"
        raise DeviceError(
            f"{workload.device} was asked for, CUDA devices found here: {there}; "
            "say device='auto', or see what headrace doctor says"
        )
    return _decide("device", f"cuda:{index}", "asked for")


def _accelerator(hardware: Hardware, workload: Workload) -> Accelerator | None:
    device: str = choose_device(hardware, workload).value
    return None if device == "cpu" else hardware.accelerators[int(device.partition(":")[2])]


# ---- the step


def step_seconds(hardware: Hardware, workload: Workload) -> float:
    """A rough time of one captured update: arithmetic, or the kernels' own length where that is more."""
    found = _accelerator(hardware, workload)
    if found is None:
        rate = hardware.gemm_all_flops or GUESSED_CORE_FLOPS * hardware.cores
        return workload.flops / (GEMM_SHARE * rate) + _parameter_seconds(hardware, workload)
    rate = found.gemm_bf16_flops if workload.bf16 else found.gemm_fp32_flops
    arithmetic = workload.flops / (GEMM_SHARE * (rate or GUESSED_DEVICE_FLOPS))
    return max(arithmetic, workload.modules * GRAPH_S_PER_MODULE)


def capture_ladder(hardware: Hardware, workload: Workload) -> tuple[Decision, ...]:
    """The ways to run a step that are worth trying, best first, eager last. Take the first that works.

    "compile" beside an accelerator means a graph of the compiled step.
    """
    if workload.capture == "chain" and not workload.chain:
        raise OptionError("capture='chain' needs a chain of dense layers on the cores; leave capture='auto'")
    found = _accelerator(hardware, workload)
    if workload.capture == "graph" and found is None:
        raise OptionError("capture='graph' needs a CUDA device; others are chain, compile and eager")
    ways = _on_cores(hardware, workload) if found is None else _on_accelerator(hardware, workload)
    ladder = [_decide("capture", name, reason) for name, reason in ways]
    if workload.capture == "auto":
        return tuple(ladder)
    asked = _decide("capture", workload.capture, "asked for")
    rest = (decision for decision in ladder if decision.value == "eager" != workload.capture)
    return (asked, *rest)


def _on_accelerator(hardware: Hardware, workload: Workload) -> Iterator[tuple[str, str]]:
    eager = "one operation at a time"
    if not workload.capturable:
        yield "eager", f"{eager}: the step reads values from the device, which a CUDA graph cannot"
        return
    pays, why = compile_pays(hardware, workload)
    if pays:
        yield "compile", why
    yield (
        "graph",
        f"the whole step is one launch; not compiled: {why}" if not pays else "the whole step is one launch",
    )
    yield "eager", eager


def _on_cores(hardware: Hardware, workload: Workload) -> Iterator[tuple[str, str]]:
    if workload.chain and not workload.bf16:
        yield "chain", "dense layers: products written in place, without autograd"
    # On two cores a compiled LeNet took 9.2 ms a step, the eager one 5.0: it is never the default.
    yield "eager", "one operation at a time; on cores torch.compile is used only when asked for"


def compile_pays(hardware: Hardware, workload: Workload) -> tuple[bool, str]:
    """Whether compiling a step for an accelerator is won back within the run, and why."""
    if workload.deterministic:
        return False, "deterministic=True keeps to fixed kernels"
    if hardware.compiler is None:
        return False, "no C++ compiler was found"
    if workload.updates is None:
        return False, "how many updates the run takes is not known"
    saved = COMPILE_GAIN * step_seconds(hardware, workload) * workload.updates
    sums = f"about {saved:.2g} s saved over {workload.updates} updates, {COMPILE_S:g} s to compile"
    return saved > COMPILE_S, sums


def choose_convolutions(hardware: Hardware, workload: Workload) -> Decision:
    """Which convolutions: the library's, or torch's plain ones, which begin sooner and compute slower.

    "tuned" lets the accelerator's library try its kernels on each shape and keep the fastest.
    """
    if _accelerator(hardware, workload) is not None:
        if workload.deterministic:
            return _decide("convolutions", "library", "deterministic=True keeps to fixed kernels")
        if workload.updates is not None and workload.updates < TUNED_UPDATES:
            return _decide("convolutions", "library", "the run is too short to try cuDNN's kernels")
        return _decide("convolutions", "tuned", "cuDNN tries its kernels on each shape and keeps the fastest")
    if workload.bf16:
        return _decide("convolutions", "library", "torch's plain ones know no bf16")
    if workload.flops >= PLAIN_CONVOLUTION_FLOPS:
        return _decide("convolutions", "library", "one update is work enough for oneDNN's kernels")
    return _decide(
        "convolutions", "plain", "one update is so little work that oneDNN's preparations outweigh it"
    )


def choose_layout(hardware: Hardware, workload: Workload) -> Decision:
    """Images with the channels last or first."""
    if not workload.convolutions:
        return _decide("layout", "contiguous", "the model has no convolutions")
    if _accelerator(hardware, workload) is None:
        if choose_convolutions(hardware, workload).value == "plain":
            return _decide("layout", "contiguous", "the plain convolutions want the channels first")
        # LeNet, batch 64, two cores: 5.0 ms a step with channels first, 4.0 with channels last.
        return _decide("layout", "channels_last", "convolutions on cores run about a quarter faster")
    if workload.bf16:
        return _decide("layout", "channels_last", "tensor cores take bf16 convolutions with channels last")
    return _decide("layout", "contiguous", "no gain is known for fp32 convolutions on accelerators")


# ---- threads and memory


def choose_threads(hardware: Hardware, workload: Workload) -> Decision:
    """Intra-op threads of the training process."""
    if _accelerator(hardware, workload) is not None:
        return _decide("threads", 1, "the accelerator computes; one thread feeds it")
    if workload.deterministic:
        return _decide("threads", 1, "deterministic=True: one thread adds in one order")
    rate = hardware.gemm_core_flops or GUESSED_CORE_FLOPS
    work_s = workload.flops / (GEMM_SHARE * rate) + _parameter_seconds(hardware, workload)
    threads = max(1, min(hardware.cores, round(work_s / THREAD_WORK_S)))
    if threads == 1:
        why = "more would wait for one another" if hardware.cores > 1 else "there is one core"
    else:
        why = "enough for each thread to be worth its waiting"
    return _decide("threads", threads, f"a step is about {work_s * 1e3:.2g} ms of one core's work: {why}")


def _parameter_seconds(hardware: Hardware, workload: Workload) -> float:
    rate = hardware.memory_copy_bytes_per_s or GUESSED_COPY_BYTES_PER_S
    return PARAMETER_PASSES * workload.parameter_bytes / rate


def model_bytes(workload: Workload) -> int:
    """Parameters, gradients, the optimizer's values and one batch's activations."""
    held = workload.parameter_bytes * (2 + workload.optimizer_copies)
    return int(held + workload.activation_bytes_per_row * workload.batch_size)


def data_memory(hardware: Hardware, workload: Workload) -> Decision:
    """Bytes that the data may take where the training happens, after the model has its share."""
    found = _accelerator(hardware, workload)
    free, share, where = (
        (hardware.available_bytes, HOST_DATA_SHARE, "memory")
        if found is None
        else (found.free_bytes, DEVICE_DATA_SHARE, f"the memory of {found.name}")
    )
    need = model_bytes(workload)
    room, one_batch = int(share * (free - need)), workload.row_bytes * workload.batch_size
    if room < one_batch:
        raise OptionError(
            f"batch_size={workload.batch_size} does not fit: the model and its activations need "
            f"{_size(need)}, one batch of data {_size(one_batch)}, and {_size(free)} of {where} are free; "
            "lower batch_size= and raise accumulate= by the same factor"
        )
    reason = f"{share:.0%} of what is free in {where} ({_size(free)}) after the model's {_size(need)}"
    return _decide("data_bytes", room, reason)


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} GB"


def _decide(name: str, value: object, reason: str) -> Decision:
    return Decision(name=name, value=value, reason=reason)
