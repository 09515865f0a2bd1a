"""Trains on this node's share of the ranks: meets the other nodes, takes the run's folder, and says which node ended a run."""

import logging
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from cp_engine.errors import ConfigError, Problem
from cp_engine.job.checks import nodes
from cp_engine.job.launch.course import Course
from cp_engine.job.launch.deaths import end_path
from cp_engine.job.launch.failures import Ending, Interrupted, RankFailure
from cp_engine.job.launch.meeting import PACKAGE, Meeting, Report
from cp_engine.job.launch.process import end_children
from cp_engine.job.launch.progress import Watch
from cp_engine.job.launch.rank import Config, section
from cp_engine.job.launch.start import after_restart, prepared, resumed, run_course, watch
from cp_engine.runtime import devices

if TYPE_CHECKING:
    from cp_engine.job.launch.meeting import Agreed

OF_ONE_NODE = ("node", "rendezvous", "verbose", "output_dir")
"""Of `launch.*`, what nodes may have each for itself."""
COMPARED = ("torch", "torchtitan", "torchtitan-npu", "torch_npu", "cp-engine")
"""Packages that must have one version on all nodes."""
MARK = ".node0"
"""What node 0 leaves in the run's folder, so that another node can tell whether it sees that folder."""
SHARED_SECONDS = 5.0
"""How long a shared folder may take to show what another node wrote."""


class NodeLost(Exception):
    """Node 0 is gone, and the store with it.

    Args:
        attempt: the number of the round that would follow.
    """

    def __init__(self, attempt: int) -> None:
        super().__init__(attempt)
        self.attempt = attempt


def launch(function: Callable[[Config], None], config: Config, output_dir: Path, *, out: TextIO) -> None:
    """Trains on the ranks of this node, beside those of the other nodes; node 0 shows progress and summary.

    Args:
        function: what each rank does; importable by name.
        config: the composed and checked configuration.
        output_dir: this node's folder, as Hydra made it; node 0's is that of the run.
        out: where to show what there is to see on this node.

    Raises:
        ConfigError: nodes did not come, or composed other configurations; SLURM did not start this process.
        RankFailure: a rank or a node ended the run.
        Interrupted: by Ctrl-C or a signal; no process is left.
    """
    node, settings = nodes.of(config), section(config, "launch")
    settings["device"] = devices.resolve(str(settings["device"]), node.ranks)
    config = {**config, "launch": settings}
    seconds, restarts, attempt = float(str(settings["join_seconds"])), int(str(settings["max_restarts"])), 0
    folder, waits = output_dir, f"{node} of {node.count} waits for the others at {node.host}:{node.port}"
    while True:
        print(f"{waits}, {seconds:g} s at most", file=out, flush=True)
        with Meeting(node, seconds) as meeting:
            agreed = _agreed(meeting, config, folder, attempt)
            folder = _take(node, output_dir, agreed, out)
            here = {**config, "launch": {**settings, "output_dir": str(folder)}}
            try:
                _run(function, here, folder, meeting, agreed, out)
                return
            except NodeLost as lost:
                attempt = lost.attempt
        if attempt > restarts:
            raise RankFailure(f"RankFailure: node 0 ({agreed.names[0]}) was lost, and no restart is left of {restarts}")
        waits = f"restart {attempt} of {restarts}: node 0 ({agreed.names[0]}) was lost; {node} waits for it"


def _agreed(meeting: Meeting, config: Config, folder: Path, attempt: int) -> "Agreed":
    settings = {key: value for key, value in section(config, "launch").items() if key not in OF_ONE_NODE}
    packages = {f"{PACKAGE}{name}": found for name in COMPARED if (found := _version(name))}
    try:
        return meeting.agree({**config, "launch": settings, **packages}, str(folder.absolute()), attempt)
    except RuntimeError as error:
        raise RankFailure(
            f"RankFailure: node 0 ended before the nodes agreed\n  {str(error).splitlines()[0]}"
        ) from error


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _take(node: nodes.Node, mine: Path, agreed: "Agreed", out: TextIO) -> Path:
    """The run's folder, in place of the one that Hydra made for this node's command."""
    folder, mine = Path(agreed.folder), mine.absolute()
    mark = folder / "ranks" / MARK
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        if node.index == 0:
            mark.write_text(agreed.token)
    except OSError as error:
        what = f"the run's folder cannot be made on {node}: {error.strerror}: {error.filename}"
        raise ConfigError([Problem(key="hydra.run.dir", what=what, tries=("hydra.run.dir=...",))]) from error
    end = time.monotonic() + SHARED_SECONDS
    while not (is_seen := mark.exists() and mark.read_text() == agreed.token) and time.monotonic() < end:
        time.sleep(0.1)
    if not is_seen:
        line = f"{node} does not see node 0's {folder}: it has one of its own there, with its ranks' logs and parts of checkpoints"
        print(f"{line}; continuing from a checkpoint needs a folder that all nodes share", file=out, flush=True)
    if mine != folder and mine.is_dir():
        _leave(mine, folder)
    return folder


def _leave(mine: Path, folder: Path) -> None:
    """Takes what Hydra began in a folder to another one, and removes it where nothing is left."""
    if not (folder / ".hydra").exists() and (mine / ".hydra").exists():
        shutil.move(mine / ".hydra", folder / ".hydra")
    if Path.cwd() == mine:
        os.chdir(folder)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler) and Path(handler.baseFilename).parent == mine:
            handler.baseFilename = str(folder / Path(handler.baseFilename).name)  # opened with its first line
    if {path.name for path in mine.iterdir()} <= {".hydra"}:
        shutil.rmtree(mine)
        for parent in (mine.parent, mine.parent.parent):
            if Path.cwd() in parent.parents and not any(parent.iterdir()):
                parent.rmdir()


def _run(
    function: Callable[[Config], None], config: Config, folder: Path, meeting: Meeting, agreed: "Agreed", out: TextIO
) -> None:
    """All rounds of the run on this node."""
    node, launch = meeting.node, section(config, "launch")
    silent_seconds = float(str(launch["watch_seconds"] or launch["join_seconds"]))
    meeting.watch_node_0(silent_seconds, partial(_leave_node_0, node, folder, agreed))
    if node.index == 0:  # what its rank 0 then tells all ranks
        try:
            resumed(config, launch, folder, out, is_restart=agreed.attempt > 0)
        except ConfigError as error:
            ending = Ending(rank=0, seconds=time.time(), message=str(error))
            meeting.report(agreed.attempt, ending, f"RankFailure: {node} refuses to start\n  {error}")
            meeting.end()
            raise
        config = {**config, "launch": launch}
    with ExitStack() as stack:
        shown: Watch | None = None
        if node.index == 0:
            shown = stack.enter_context(watch(config, ranks=node.all_ranks, out=out))
        deaths = stack.enter_context(prepared(node, folder))
        course = Course(
            node,
            folder,
            deaths,
            print if shown is None else shown.say,
            max_restarts=int(str(launch["max_restarts"])),
            attempt=agreed.attempt,
            meeting=meeting,
            seconds=float(str(launch["join_seconds"])),
            silent_seconds=silent_seconds,
            going_on=partial(after_restart, config, folder),
        )
        if shown is None:
            ranks = f"ranks {node.own.start} to {node.own.stop - 1} of {node.all_ranks}"
            print(
                f"{node} starts {ranks}, output in {folder}; progress is on node 0 ({agreed.names[0]})",
                file=out,
                flush=True,
            )
        _until_the_end(partial(run_course, function, config, folder, course), meeting, course, agreed)
    if shown is not None:
        print(shown.summary(course.notes()), file=out, flush=True)
    else:
        print(f"done     {node}; the summary is on node 0 ({agreed.names[0]})", file=out, flush=True)


def _leave_node_0(node: nodes.Node, folder: Path, agreed: "Agreed") -> None:
    """Ends this launcher and its ranks from a thread: the main thread waits for node 0's store."""
    end_children()
    for rank in node.own:
        end_path(folder, rank).unlink(missing_ok=True)
    print(_text(Report(node=0, ending=None, text=""), node, agreed), file=sys.stderr, flush=True)
    os._exit(1)


def _until_the_end(run: Callable[[], None], meeting: Meeting, course: Course, agreed: "Agreed") -> None:
    from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError, RendezvousTimeoutError

    from cp_engine.job.launch.rounds import Over

    try:
        try:
            run()
            if not meeting.is_over():
                return
            course.failed()
        except RankFailure:
            pass  # told
        except Interrupted as interrupted:
            ending = Ending(rank=course.node.own.start, seconds=time.time(), message=f"interrupted by {interrupted}")
            text = f"RankFailure: {course.node} was interrupted by {interrupted}, which ended the run"
            with suppress(RuntimeError):  # node 0 may be gone
                meeting.report(course.attempt, ending, text)
                meeting.end()
            raise
        except RendezvousTimeoutError as error:
            meeting.end()
            what = f"not all of {course.node.count} nodes came back within {course.seconds:g} s (launch.join_seconds)"
            lines = [f"RankFailure: restart {course.attempt} of {course.max_restarts}: {what}"]
            lines += [f"  {_text(meeting.first(course.told, is_last=False), course.node, agreed)}"]
            raise RankFailure("\n".join(lines)) from error
        except (Over, RendezvousClosedError):
            if course.is_running:
                course.failed()
            if course.told < 0:
                raise RankFailure(f"RankFailure: the run that {course.node} was to join has ended") from None
        meeting.end()
        report = meeting.first(course.told, is_last=True)
    except (RendezvousError, RuntimeError) as error:  # of the store
        if course.node.index == 0:
            raise
        raise NodeLost(course.attempt + course.is_running) from error
    raise RankFailure(_text(report, course.node, agreed))


def _text(report: Report | None, node: nodes.Node, agreed: "Agreed") -> str:
    """What this node shows of the end of a run."""
    if report is None:
        return "RankFailure: the run was ended, and no node says why"
    where = f"node {report.node} ({agreed.names[report.node]})"
    if report.ending is None:
        return (
            f"RankFailure: {where} was lost: it does not answer (killed or stopped, or its machine or network is down)"
        )
    if node.index in (0, report.node):
        return report.text
    lines = [f"RankFailure: rank {report.ending.rank} of {node.all_ranks} on {where} ended the run"]
    lines += [f"  {report.ending.message.splitlines()[0]}"]
    return "\n".join([*lines, f"  its log is shown there, and on node 0 ({agreed.names[0]})"])
