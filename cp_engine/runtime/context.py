"""Runtime: a plan on real ranks, as a context manager around a model."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from math import prod
from typing import overload

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from cp_engine.algebra.mask import Mask
from cp_engine.errors import CallError, Problem
from cp_engine.exchange.process_group import GroupCommunicator
from cp_engine.exchange.target import Target
from cp_engine.exchange.watch import Begun
from cp_engine.plan.ir import Plan
from cp_engine.runtime import connect as c10d
from cp_engine.runtime import gradients
from cp_engine.runtime.arguments import of_engine, of_length, wrong
from cp_engine.runtime.attach import Site, attach, detach
from cp_engine.runtime.call import Call, read
from cp_engine.runtime.connect import connect
from cp_engine.runtime.known_modules import find
from cp_engine.runtime.planned_attention import PlannedAttention
from cp_engine.runtime.recompute import Memo, Result
from cp_engine.runtime.shard import Unshard, take, unsharding


class ContextParallel:
    """A proved composition on the ranks of a device mesh.

    Args:
        plan: from `cp_engine.compile` or `schema.plan_from_config`; equal on all ranks.
        mesh: 1-D over the plan's ranks, or N-D with the plan's axis names; None for a plan of one rank.
        device: device type of the tensors; None is the mesh's, or cpu.
        kernels: device whose kernels are chosen, such as `npu_reference`; None is `device`.
        heads: 1-D over the ranks that hold the other heads of the same queries, where the plan's shape has `head_ranks`.

    Raises:
        CallError: a mesh does not fit, or ranks hold different plans (on every rank).
    """

    def __init__(
        self,
        plan: Plan,
        mesh: DeviceMesh | None = None,
        device: str | None = None,
        kernels: str | None = None,
        heads: DeviceMesh | None = None,
    ) -> None:
        with c10d.together(mesh):
            if problems := of_engine(plan, mesh, device, kernels, heads):
                raise CallError(problems, plan.name if isinstance(plan, Plan) else "")
        self.plan = plan
        self.rank = 0
        self._communicator: GroupCommunicator | None = None
        if mesh is not None and plan.degree > 1:
            self._communicator, self.rank = connect(plan, mesh)
        self.device = device or (mesh.device_type if mesh is not None else "cpu")
        beside = None
        if heads is not None and plan.shape.head_ranks > 1:
            beside = c10d.beside(plan, self.rank, heads.get_group())
        self._target = Target(
            ranks=(self.rank,), device=kernels or self.device, communicator=self._communicator, heads=beside
        )
        self._attention = PlannedAttention(plan, self._target)
        self._sites: dict[int, Site] = {}
        self._summed: dict[int, Tensor] = {}
        self._summed_at = self._sums = self._unshards = 0
        self._is_closed = False
        self._watch = None if self._communicator is None else self._communicator.watch
        self._told: AbstractContextManager[None] = self._watch or nullcontext()  # other ranks learn of errors inside
        if self._watch is not None:
            self._watch.start(self, self._begun)

    @property
    def sequence(self) -> int:
        """The length that the plan is for, in tokens."""
        return self.plan.shape.sequence

    @property
    def ranks(self) -> tuple[int, ...]:
        """World rank of each plan rank; empty for a plan of one rank."""
        return self._communicator.ranks if self._communicator else ()

    @property
    def bytes_sent(self) -> int:
        """Bytes that left this rank in exchanges so far, counted at the collectives; its own part is not counted."""
        return self._communicator.traffic.bytes_sent if self._communicator else 0

    @property
    def collectives(self) -> int:
        """Collectives that this rank took part in so far."""
        return self._communicator.traffic.collectives if self._communicator else 0

    @property
    def passes(self) -> int:
        """Forward and backward passes of attention that this rank has begun so far."""
        return sum(self._attention.passes)

    # -------------------------------------------------------------- attention
    @contextmanager
    def context(self, *modules: nn.Module) -> Iterator["ContextParallel"]:
        """Routes the attention calls of these modules through the plan until the block is left.

        Args:
            modules: models, or attention modules themselves.

        Raises:
            CallError: a module has no attention that can be attached to, or the block ends without an attention call.
        """
        self._require_open()
        if not modules:
            raise self._error(Problem(key="context", what="is given no module", tries=("context(model)",)))
        with self._told, ExitStack() as undo:
            sites = [attach(m, binding) for m, binding in find(modules, self.plan.inputs)]
            before = sum(s.calls for s in sites) + self._attention.runs_in_graphs
            for site in sites:
                self._sites[id(site.module)] = site
                if not any(e is self for e in site.users):
                    site.users.append(self)
                site.active.append(self)
                undo.callback(site.leave, self)
            yield self
            if sum(s.calls for s in sites) + self._attention.runs_in_graphs == before:
                what = f"no attention call of {', '.join(type(m).__name__ for m in modules)} was intercepted"
                rule = ("rule", "the model runs inside the block")
                raise self._error(Problem(key="context", what=what, details=(rule,)))

    def call(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        is_causal: bool = True,
        enable_gqa: bool = False,
        mask: Mask | Mapping[str, object] | str | None = None,
        sinks: Tensor | None = None,
        **others: object,
    ) -> Tensor:
        """Attends over the whole sequence, from this rank's tokens.

        Args:
            q: [B, H, S_local, D], tokens in the plan's entry layout.
            k: [B, K, S_local, D].
            v: [B, K, S_local, Dv].
            scale: factor on the scores; None is D ** -0.5.
            is_causal: must agree with the mask that the plan was proved for.
            enable_gqa: whether K may be less than H.
            mask: a mask or its configuration, over the whole sequence; it wins over `is_causal`.
            sinks: [H], where the plan has sinks.
            others: refused by name, so that nothing that a model passes is dropped.

        Returns:
            [B, H, S_local, Dv], in q's dtype.

        Raises:
            CallError: the call differs from what the plan was proved for.
        """
        named = {"scale": scale, "is_causal": is_causal, "enable_gqa": enable_gqa, "mask": mask, "sinks": sinks}
        return self.attend(read((q, k, v), {**others, **named})).out

    def attend(self, call: Call, passed: Sequence[Memo] | None = None) -> Result:
        """One call of an attached module, or of one's own with tensors that are not q, k and v.

        Args:
            call: local tensors and what the call says about them.
            passed: in a recompute, what the passes that it may repeat have left; None in a pass.

        Returns:
            out [B, H, S_local, Dv], this rank's share of the plan's losses, and what a recompute may use.

        Raises:
            CallError: the call differs from what the plan was proved for.
        """
        if self._is_closed or not isinstance(call, Call):
            self._require_open()
            raise self._error(*wrong("call", call, Call, "a cp_engine.runtime.call.Call", "engine.call(q, k, v)"))
        with self._told:
            return self._attention.attend(call, passed)

    def made(self, name: str, call: Call) -> Tensor:
        """A tensor that a step of the composition makes on the way, such as `topk`; every rank of the plan calls it.

        Args:
            name: in what a step of the plan `makes`.
            call: what the module was called with.

        Returns:
            [B, ...], in the layout after that step.

        Raises:
            CallError: the call differs from what the plan was proved for.
        """
        return self._attention.made(name, call)

    def attend_compiled(self, call: Call) -> Tensor:
        """The same while torch.compile traces the model."""
        return self._attention.attend_compiled(call)

    # -------------------------------------------------------------- tokens
    @overload
    def shard(self, tensor: Tensor, /, *, dim: int = 1) -> Tensor: ...
    @overload
    def shard(self, tensor: Tensor, /, *tensors: Tensor, dim: int = 1) -> tuple[Tensor, ...]: ...
    def shard(self, tensor: Tensor, /, *tensors: Tensor, dim: int = 1) -> Tensor | tuple[Tensor, ...]:
        """This rank's tokens of tensors that every rank holds whole; all are cut by the same positions.

        Args:
            tensor, tensors: the global sequence length along `dim`; equal on all ranks. Labels must be shifted already.
            dim: the sequence dim.

        Returns:
            One tensor for one, a tuple for several; differentiable.

        Raises:
            CallError: a tensor has another length along `dim`.
        """
        problems = [
            replace(p, details=(("rule", "tensors are cut whole, together with the tokens"),))
            for i, x in enumerate((tensor, *tensors))
            for p in of_length(f"shard.tensors[{i}]", x, dim, self.plan.shape.sequence, "the plan is for")
        ]
        if problems:
            raise self._error(*problems)
        held = self.plan.entry.sequence[self.rank]
        cut = tuple(take(x, held, dim) for x in (tensor, *tensors))
        return cut if tensors else cut[0]

    def unshard(self, tensor: Tensor, *, dim: int = 1) -> Tensor:
        """The whole sequence on every rank, in the order of the positions.

        Differentiable: the gradient of a rank's tokens is the sum over ranks of what each rank's loss says, so a loss that every
        rank computes alike must be divided by the number of ranks.

        Args:
            tensor: this rank's tokens along `dim`.
            dim: the sequence dim.

        Raises:
            CallError: the tensor does not hold this rank's tokens along `dim`.
        """
        local = self.plan.entry.sequence[self.rank].count
        if problems := of_length("unshard.tensor", tensor, dim, local, "this rank holds"):
            raise self._error(*problems)
        if tensor.is_complex():
            what = f"is {tensor.dtype}, and gradients are summed as real numbers"
            raise self._error(Problem(key="unshard.tensor", what=what, tries=("torch.view_as_real(...)",)))
        moved = tensor.movedim(dim, 0)
        flat = moved.reshape(1, 1, local, prod(moved.shape[1:]))
        self._unshards += 1
        together: Tensor = Unshard.apply(flat, unsharding(self.plan, self._target))
        return together.reshape(self.plan.shape.sequence, *moved.shape[1:]).movedim(0, dim)

    # -------------------------------------------------------------- gradients
    def sum_gradients(self, model: nn.Module) -> None:
        """Sums the gradients of a model over the plan's ranks; each rank's backward gives its tokens' share.

        Once per step, and not where FSDP or DDP already reduces over these ranks.

        Args:
            model: its parameters' `grad` become the sum; parameters without a gradient on any rank are left alone.

        Raises:
            CallError: a wrapper reduces over these ranks already, or these gradients were summed before.
        """
        self._require_open()
        if problems := wrong("model", model, nn.Module, "a module", "sum_gradients(model)"):
            raise self._error(*problems)
        communicator = self._communicator
        problems, passes = gradients.refusals(model, set(self.ranks or (0,)), self._summed), self._attention.passes
        if passes[1] == self._summed_at and not problems:
            what = f"no backward has gone through this engine{' since gradients were summed' if self._sums else ''}"
            problems.append(Problem(key="sum_gradients", what=what, details=(gradients.ONCE,)))
        parameters = [p for p in model.parameters() if p.requires_grad]
        with self._told:
            if communicator is not None and not problems:
                self._sums += 1
                with communicator.explained():
                    group = communicator.groups[tuple(range(self.plan.degree))]
                    problems = gradients.reduce(parameters, passes, group, self.device)
            if problems:
                raise self._error(*problems[:8])
        self._summed = {id(p): p.grad for p in parameters if p.grad is not None}
        self._summed_at = passes[1]

    def _begun(self) -> Begun:
        return Begun(int(self._is_closed), self._sums, self._unshards, *self._attention.passes)

    def __reduce__(self) -> tuple[object, ...]:
        what = "holds process groups of this process, and cannot be copied or sent to another"
        raise self._error(Problem(key="engine", what=what, tries=("cp_engine.compile(...) there",)))

    def _error(self, *problems: Problem) -> CallError:
        return CallError(problems, self.plan.name)

    def _require_open(self) -> None:
        if self._is_closed:
            raise self._error(Problem(key="close", what="the engine is closed", tries=("cp_engine.compile(...)",)))

    def close(self) -> None:
        """Removes the inert wrappers; process groups stay, for the next engine over the same ranks, until their world ends.

        Close when no backward is left to run: a checkpoint that recomputes later would find the module as it was before.

        Raises:
            CallError: a context of this engine is still open.
        """
        if any(e is self for site in self._sites.values() for e in site.active):
            rule = ("rule", "leave the block, then close")
            raise self._error(Problem(key="close", what="a context is still open", details=(rule,)))
        for site in self._sites.values():
            detach(site, self)
        self._sites.clear()
        self._is_closed = True
        if self._watch is not None:
            self._watch.end()
