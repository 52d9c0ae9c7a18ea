"""How often each buffer is used, measured and remembered: the shell around `headrace.buffer.rounds`.

``history`` lists every change of the rounds with its reason. Ranks that train together must take equally many
steps, so the first rank's choice is everybody's.
"""

from __future__ import annotations

import time
from typing import Any, Literal

import torch

from headrace.buffer.rounds import Timing, choose_rounds
from headrace.errors import OptionError
from headrace.types import State


class Reuse:
    """The rounds of each buffer."""

    def __init__(self, rounds: int | Literal["auto"], device: torch.device, world_size: int = 1) -> None:
        self.auto = rounds == "auto"
        self.current = 1 if isinstance(rounds, str) else rounds
        self.timing = Timing()
        self.history: list[dict[str, Any]] = []
        self._world_size = world_size
        self._clock = RoundClock(device)
        self._step_size: float | None = None
        self._largest_step = 0.0

    def set_step_size(self, step_size: float) -> None:
        """Tell the step size; rounds follow it down from its largest value."""
        self._step_size = step_size
        self._largest_step = max(self._largest_step, step_size)

    @property
    def step_fraction(self) -> float:
        """The step size over its largest so far; 1 when nobody told it."""
        if self._step_size is None or self._largest_step == 0.0:
            return 1.0
        return self._step_size / self._largest_step

    def choose(self, pass_index: int, buffer: int) -> int:
        """The rounds for the buffer that comes next."""
        if not self.auto:
            return self.current
        for seconds in self._clock.finished():
            self.timing = self.timing.with_round(seconds)
        rounds, why = choose_rounds(self.timing, self.step_fraction)
        rounds = agreed(rounds, self._world_size)
        if not self.history or rounds != self.current:
            self.history.append({"pass": pass_index, "buffer": buffer, "rounds": rounds, "why": why})
        self.current = rounds
        return rounds

    def loaded(self, seconds: float) -> None:
        """A buffer was read in so many seconds."""
        self.timing = self.timing.with_load(seconds)

    def round_begins(self) -> None:
        self._clock.begin()

    def round_ends(self) -> None:
        self._clock.end()

    def state_dict(self) -> State:
        return {
            "rounds": self.current,
            "auto": self.auto,
            "history": [dict(entry) for entry in self.history],
            "load_s": self.timing.load_s,
            "round_s": self.timing.round_s,
            "step_size": self._step_size,
            "largest_step": self._largest_step,
        }

    def load_state_dict(self, state: State) -> None:
        self.current, self.auto = int(state["rounds"]), bool(state["auto"])
        self.history = [dict(entry) for entry in state["history"]]
        self.timing = Timing(state["load_s"], state["round_s"])
        self._step_size, self._largest_step = state["step_size"], state["largest_step"]


def agreed(rounds: int, world_size: int) -> int:
    """The first rank's choice, where several train together."""
    if world_size == 1:
        return rounds
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise OptionError(
            'rounds="auto" with several ranks needs torch.distributed, so that one rank can choose for all; '
            "start it first or give a number of rounds"
        )
    choice = torch.tensor([rounds])
    torch.distributed.broadcast(choice, src=0)
    return int(choice)


class RoundClock:
    """How long rounds take: on the device's own clock where it has one, without waiting for the device."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._began: Any = None
        self._done: list[Any] = []

    def begin(self) -> None:
        self._began = self._now()

    def end(self) -> None:
        self._done.append((self._began, self._now()))

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream())
        return event

    def finished(self) -> list[float]:
        """The rounds whose end the device has passed since the last call, in seconds."""
        if not self._cuda:
            seconds = [end - begin for begin, end in self._done]
            self._done = []
            return seconds
        asked = [(pair, pair[1].query()) for pair in self._done]
        self._done = [pair for pair, passed in asked if not passed]
        return [begin.elapsed_time(end) / 1000 for (begin, end), passed in asked if passed]
