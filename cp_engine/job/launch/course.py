"""The course of a run on one node: its rounds, which rank ended one, and what is said of it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cp_engine.job.checks.nodes import Node
from cp_engine.job.launch.deaths import Deaths
from cp_engine.job.launch.failures import Ending, RankFailure
from cp_engine.job.launch.progress import log_path
from cp_engine.job.launch.rank import failure_text

if TYPE_CHECKING:
    from cp_engine.job.launch.meeting import Meeting


class Course:
    """A run that may take several rounds, since all ranks are started again when one has failed.

    Args:
        node: this one.
        output_dir: the run's folder.
        deaths: of this node's ranks.
        say: shows a line.
        max_restarts: how often ranks are started again.
        attempt: the number of the first round, of a run that goes on.
        meeting: with the other nodes; None where there are none.
        seconds: how long a round waits for its nodes.
        silent_seconds: how long a node may not say that it is alive.
        going_on: says what a further round continues from.

    Attributes:
        environment: of this process, for its ranks.
        told: the number of the last round that ended badly; -1 where none did.
        is_running: whether a round has begun whose end is not told.
    """

    def __init__(
        self,
        node: Node,
        output_dir: Path,
        deaths: Deaths,
        say: Callable[[str], None],
        *,
        max_restarts: int = 0,
        attempt: int = 0,
        meeting: "Meeting | None" = None,
        seconds: float = 60.0,
        silent_seconds: float = 60.0,
        going_on: Callable[[], str] = str,
    ) -> None:
        self.node, self.max_restarts, self.attempt, self.meeting = node, max_restarts, attempt, meeting
        self.seconds, self.silent_seconds, self._going_on = seconds, silent_seconds, going_on
        self.environment = dict[str, str]()
        self._output_dir, self._deaths, self._say = output_dir, deaths, say
        self._cause: Ending | None = None
        self.told, self.is_running = -1, False

    def failed(self, flagged: Sequence[Ending] = ()) -> Ending | None:
        """A round has ended badly: notes why, before the next one clears its traces, and tells the other nodes.

        Args:
            flagged: what torch's agent says.

        Returns:
            How the first rank of this node ended, if one did.
        """
        first = self._deaths.first(flagged, is_alone=self.meeting is None)
        self._cause, self.told = first, self.attempt
        if self.meeting is not None:
            self.meeting.report(self.attempt, first, "" if first is None else self.text(first))
        self.is_running = False
        return first

    def is_done(self) -> bool:
        """Whether every rank of this node said that it ended well; one that left with exit code 0 is that to torch's agent, too."""
        return self._deaths.are_done()

    def is_ended_here(self) -> bool:
        """Whether the agent was told to end, since it did not see that a rank had ended."""
        return self._deaths.has_ended_run

    def failure(self, *flagged: Ending) -> RankFailure:
        """The error of a run that has no restart left.

        Args:
            flagged: what torch's agent says.
        """
        first = self.failed(flagged)
        assert first is not None
        return RankFailure(self.text(first))

    def begins(self) -> None:
        """A round begins on all nodes: logs of the last one are kept beside those of this one."""
        self.is_running = True
        self._deaths.begin()
        for rank in self.node.own:
            log = log_path(self._output_dir, rank)
            if self.attempt and log.exists():
                log.replace(log.with_name(f"rank{rank}.round{self.attempt - 1}.log"))
        if self.attempt and self.node.index == 0:
            self._say(f"restart {self.attempt} of {self.max_restarts}: {self._why()}; {self._going_on()}".rstrip("; "))

    def _why(self) -> str:
        cause = self._cause
        if self.meeting is not None:
            report = self.meeting.first(self.attempt - 1, is_last=False)
            if report is not None and report.ending is None:
                return f"node {report.node} was lost, and has come back"
            cause = None if report is None else report.ending
        if cause is None:
            return "a rank ended, and left no word"
        return f"rank {cause.rank} of {self.node.all_ranks}: {cause.message.splitlines()[0]}"

    def text(self, ending: Ending) -> str:
        """The error of a rank of this node, with the end of its log."""
        text = failure_text(self._output_dir, ending, self.node.all_ranks)
        return text if self.meeting is None else text.replace(" ended the run", f" on {self.node} ended the run", 1)

    def notes(self) -> list[str]:
        """A line for the end, where there were restarts."""
        return [f"restarts {self.attempt} of {self.max_restarts}"] if self.attempt else []
