"""Primitives of other packages: what is wrong with one is said with its package, its class and its step, whatever it is."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cp_engine.algebra import tensors
from cp_engine.errors import CPError, PrimitiveError
from cp_engine.job import explain
from tests.conftest import Result
from tests.helpers import CAUSAL, assert_equals_reference, computed, in_float64, plan_of, small

HEAD = """
from dataclasses import dataclass, field
from cp_engine.algebra.index_set import IndexSet, Run, union, whole
from cp_engine.algebra.layout import Layout, contiguous
from cp_engine.plan.state import Refused
from cp_engine.plan.token_layout import TokenLayout
from cp_engine.primitives.exchange import Exchange
"""
ORDER = """
@dataclass(frozen=True, kw_only=True)
class Mine(TokenLayout):
    kind = "mine"
    turns: int = 1
    def deal(self, held, ranks, mask):
        {body}
"""
STEP = """
@dataclass(frozen=True, kw_only=True)
class Mine(Exchange):
    kind = "mine"
    turns: int = 1
    used_axes = ("cp",)
    def axes_of(self, state, tensor):
        {axes}
    def destination(self, state, tensor):
        {body}
"""
GATHERED = "return state.layout(tensor).replaced('sequence', self.joined(state, tensor, 'sequence', ('cp',)))"
FAILING = """
    def lower(self, planned, plan, target):
        operation = super().lower(planned, plan, target)
        def fails(*_): raise RuntimeError("no wire")
        {body}
        return operation
"""
COMMAND = ("--config-dir", "my", "cp=allgather_kv", "shape.sequence=16")
LAYOUT = ("layout@cp.layout=mine",)
GATHER = ("collective@cp.steps.gather=mine", "~cp.steps.gather.axes", "~cp.steps.gather.dim", "~cp.steps.gather.only")

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a package with one primitive: a module and its metadata on the path, and files of its kind in a folder."""

    def run(source: str, entry: str = "my_steps:Mine") -> Path:
        info = tmp_path / "site" / "my_steps-1.2.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-steps\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[cp_engine.primitives]\nmine = {entry}\n")
        (tmp_path / "site" / "my_steps.py").write_text(HEAD + source)
        for group in ("layout", "collective"):
            (tmp_path / "my" / group).mkdir(parents=True)
            (tmp_path / "my" / group / "mine.yaml").write_text("kind: mine\n")
        monkeypatch.syspath_prepend(tmp_path / "site")
        return tmp_path / "my"

    yield run
    sys.modules.pop("my_steps", None)


def refusal(config_dir: Path, *overrides: str) -> str:
    """What planning says."""
    with pytest.raises(CPError) as error:
        plan_of("allgather_kv", *overrides, config_dir=config_dir).costs  # noqa: B018 (a property that computes)
    return str(error.value)


@pytest.mark.quick
def test_faultless_layout_of_a_package_is_taken(install: Install) -> None:
    folder = install(ORDER.format(body="return contiguous(held, ranks)"))
    assert (
        plan_of("allgather_kv", *LAYOUT, "+cp.layout.turns=2", config_dir=folder).costs == plan_of("allgather_kv").costs
    )


def test_step_of_a_package_is_verified_and_its_annotations_may_be_strings(
    install: Install, command: Callable[..., Result]
) -> None:
    install(STEP.format(axes="return ('cp',)", body=GATHERED).replace("turns: int", "turns: 'int'"))
    result = command(*COMMAND, "mode=verify", *GATHER, "+cp.steps.gather.turns=2")
    assert result.code == 0, result.err
    assert result.out.rstrip().endswith("verified")


def test_a_fault_is_all_that_a_user_reads(install: Install, command: Callable[..., Result]) -> None:
    install(ORDER.format(body="return contiguous(held, ranks // (self.turns - 1))"))
    result = command(*COMMAND, "mode=explain", *LAYOUT)
    assert result.code == 1
    assert result.err.splitlines() == [
        "PrimitiveError: 1 problem in cp=allgather_kv",
        "  1. cp.layout  Mine.deal raised ZeroDivisionError: integer division or modulo by zero (my_steps.py:14 in deal)",
        "     of    my_steps.Mine, of my-steps 1.2",
        "     rule  a primitive refuses what it cannot do by raising cp_engine.plan.state.Refused",
        "     see   docs/configuration.md, Primitives of one's own",
    ]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return contiguous(held, ranks + 1)", "deal returned 3 shares for 2 ranks"),
        ("return None", "deal returned None, not a Sequence"),
        ("return [None] * ranks", "deal returned None, not a IndexSet"),
        ("return [held] * ranks", "deal gave a position to two ranks"),
        ("return [held.part(0, 1), held.part(2, 3)]", "deal dealt 0..1 2..5, and 0..16 was held"),
        (
            "return contiguous(held, ranks // (self.turns - 1))",
            "ZeroDivisionError: integer division or modulo by zero (my_steps.py:",
        ),
        ("raise KeyError('x')", "deal raised KeyError: 'x' (my_steps.py:"),
    ],
)
def test_faulty_layout_is_named_and_not_the_step_behind_it(install: Install, body: str, said: str) -> None:
    text = refusal(install(ORDER.format(body=body)), *LAYOUT)
    assert text.startswith("PrimitiveError: 1 problem in cp=allgather_kv\n  1. cp.layout  Mine.")
    assert said in text and "my_steps.Mine, of my-steps 1.2" in text
    assert "gather" not in text.partition("\n")[2]


@pytest.mark.parametrize(
    ("axes", "body", "said"),
    [
        ("return ('nodes',)", GATHERED, "axes_of returned ('nodes',), and the mesh has ('cp',)"),
        ("return 'cp'", GATHERED, "axes_of returned a str, not a tuple"),
        ("return ('cp',)", "return None", "destination returned None, not a Layout"),
        ("return ('cp',)", "return Layout((whole(16),), (whole(16),))", "destination returned 1 shares of sequence for 2 ranks"),
        ("return ('cp',)", "return Layout((whole(8),) * 2, (whole(16),) * 2)", "returned a share of 8 sequence, and there are 16"),
        ("return ('cp',)", "return state.layouts['nope']", "infer raised KeyError: 'nope' (my_steps.py:"),
        ("return ('cp',)", f"{GATHERED}\n    def infer(self, state): return state", "infer returned a State, not a tuple"),
        ("return ('cp',)", f"{GATHERED}\n    def infer(self, state): return state, None", "infer returned None, not a tuple"),
        ("return ('cp',)", f"{GATHERED}\n    def cost(self, planned, plan): return None", "cost returned None, not a Cost"),
        ("return ('cp',)", f"{GATHERED}\n    used_axes = 3", "used_axes returned a int, not a tuple"),
        ("return ('cp',)", f"{GATHERED}\n    def __post_init__(self): raise ValueError('turns')", "ValueError: turns (my_steps.py:"),
    ],
)  # fmt: skip
def test_faulty_step_is_named(install: Install, axes: str, body: str, said: str) -> None:
    text = refusal(install(STEP.format(axes=axes, body=body)), *GATHER)
    assert text.startswith("PrimitiveError: 1 problem") and "1. cp.steps.gather  Mine." in text
    assert said in text and "my_steps.Mine, of my-steps 1.2" in text


@pytest.mark.parametrize("way", ["forward", "backward", "lower"])
def test_step_that_fails_while_it_runs_is_named(install: Install, way: str) -> None:
    body = "fails()" if way == "lower" else f"operation.{way} = fails"
    folder = install(STEP.format(axes="return ('cp',)", body=GATHERED) + FAILING.format(body=body))
    plan = plan_of("allgather_kv", *GATHER, config_dir=folder)
    with pytest.raises(PrimitiveError, match="no wire") as error:
        computed(plan)
    method = "lower" if way == "lower" else f"lower().{way}"
    assert f"cp.steps.gather  Mine.{method} raised RuntimeError: no wire (my_steps.py:" in str(error.value)
    assert isinstance(error.value.__cause__, RuntimeError)


def test_reason_of_the_package_keeps_its_words(install: Install) -> None:
    body = "raise Refused('not today', rule='only on Sundays')"
    text = refusal(install(STEP.format(axes="return ('cp',)", body=body)), *GATHER)
    assert "LayoutError" in text and "cp.steps.gather  not today" in text


@pytest.mark.parametrize(
    ("source", "entry", "said"),
    [
        ("1 / 0", "my_steps:Mine", "cannot be imported: ZeroDivisionError: division by zero (my_steps.py:"),
        ("", "my_stepz:Mine", "cannot be imported: ModuleNotFoundError: No module named 'my_stepz'"),
    ],
)
def test_package_that_cannot_be_imported_is_named(install: Install, source: str, entry: str, said: str) -> None:
    text = refusal(install(source, entry))
    assert f"cp_engine.primitives: mine = {entry}  {said}" in text and "of    my-steps 1.2" in text


def test_classes_that_are_no_primitives_are_all_refused(install: Install) -> None:
    order = ORDER.format(body="pass")
    classes = {  # class -> its source, and what is said of it
        "Number": ("Mine = 3", "is 3"),
        "Plain": ("class Mine: kind = 'mine'", "is <class 'my_steps.Plain'>"),
        "NoKind": (order.replace('kind = "mine"', ""), "NoKind states no kind"),
        "Taken": (
            order.replace('"mine"', '"zigzag"'),
            "Taken has the kind 'zigzag', and cp_engine.primitives.layouts.Zigzag",
        ),
        "NoDeal": (order.replace("def deal", "def dael"), "NoDeal lacks deal"),
        "NoMethods": (
            STEP.format(axes="pass", body="pass").replace("def ", "def x_"),
            "NoMethods lacks axes_of, destination",
        ),
        "NoKeys": (order.replace("@dataclass(frozen=True, kw_only=True)", ""), "NoKeys is no dataclass: turns"),
        "Odd": (order.replace("int = 1", "dict = None"), "Odd.turns is declared as <class 'dict'>"),
        "Unread": (
            order.replace("turns: int", "turns: 'Nope'"),
            "Unread has fields whose types cannot be read: NameError: name 'Nope'",
        ),
    }
    folder = install(
        "".join(
            source.replace("Mine", name).replace('"mine"', f'"{name}"') + "\n" for name, (source, _) in classes.items()
        )
    )
    entries = "".join(f"{name} = my_steps:{name}\n" for name in classes)
    (folder.parent / "site" / "my_steps-1.2.dist-info" / "entry_points.txt").write_text(
        f"[cp_engine.primitives]\n{entries}"
    )
    text = refusal(folder)
    assert text.startswith(f"ConfigError: {len(classes)} problems")
    missing = [
        said
        for name, (_, said) in classes.items()
        if f"cp_engine.primitives: {name} = my_steps:{name}  {said}" not in text
    ]
    assert not missing, text


# ------------------------------------------------------------------ kernels and tensors
KERNEL = """
from cp_engine.kernels.math import Math
class Counting(Math):
    name, summary, calls = "counting", "math, counted", 0
    def forward(self, *given):
        type(self).calls += 1
        return super().forward(*given)
class Half:
    name, summary, limits = "half", "no backward", Math.limits
    def refusal(self, request): ...
    def forward(self, q, k, v, tile, scale): ...
counting, half, Type, taken = Counting(), Half(), Counting, Math()
"""
ROW = """
from cp_engine.algebra.tensors import Row
bias = Row(name="bias", heads="kv", width=lambda shape: 3, dtype="statistic")
other, q = Row(name="another", heads="q", width=lambda shape: 1), Row(name="q", heads="q", width=lambda shape: 1)
"""


def bring(folder: Path, group: str, *names: str) -> None:
    text = f"[{group}]\n" + "".join(
        f"{name} = my_steps:{target or name}\n" for name, _, target in (n.partition("=") for n in names)
    )
    (folder.parent / "site" / "my_steps-1.2.dist-info" / "entry_points.txt").write_text(text)


def test_kernel_of_a_package_is_taken_by_its_name(install: Install) -> None:
    bring(install(KERNEL), "cp_engine.kernels", "counting")
    named = plan_of("ring", "cp.steps.attend.kernel=counting")
    assert "attend: counting (named in the configuration)" in explain.text(named)
    assert "counting" not in explain.text(plan_of("ring"))
    with pytest.raises(CPError, match=r"allowed +auto, .*, counting"):
        plan_of("ring", "cp.steps.attend.kernel=countin")
    assert_equals_reference(in_float64(named), CAUSAL)
    assert sys.modules["my_steps"].Counting.calls > 0


def test_objects_that_are_no_kernels_are_refused(install: Install) -> None:
    bring(install(KERNEL), "cp_engine.kernels", "half", "other=counting", "Type", "math=taken")
    with pytest.raises(CPError) as error:
        plan_of("ring")
    for said in (
        "half = my_steps:half  is <my_steps.Half",
        "and lacks backward",
        "other = my_steps:counting  calls itself counting",
    ):
        assert said in str(error.value)
    assert "Type = my_steps:Type  is <class 'my_steps.Counting'>, and lacks an instance" in str(error.value)
    assert "math = my_steps:taken  math is a kernel of the engine" in str(error.value)


def test_tensor_of_a_package_is_a_row(install: Install) -> None:
    folder, shape = install(ROW), small(heads=8, kv_heads=4)
    bring(folder, "cp_engine.tensors", "bias")
    assert tensors.size_of(shape, "bias", 5) == (shape.batch, shape.kv_heads, 5, 3)
    assert tensors.element_bytes(replace(shape, dtype="bfloat16"), "bias") == 4
    bring(folder, "cp_engine.tensors", "other", "q")
    sys.path.insert(0, str(folder.parent / "other"))  # rows are looked up once for each path
    try:
        with pytest.raises(CPError, match="other = my_steps:other  is Row") as error:
            tensors.row("unknown")
    finally:
        sys.path.remove(str(folder.parent / "other"))
    assert "q is a tensor of the engine" in str(error.value)


def test_fault_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("cp_engine.primitives.layouts.Contiguous.deal", broken)
    with pytest.raises(ZeroDivisionError):
        plan_of("allgather_kv")
