"""InFlight: the tensors of a composition between two of its steps, some of them still on their way."""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor


class InFlight(dict[str, list[Tensor]]):
    """tensor name -> one tensor [B, H, S, D] per local rank. What is on its way is waited for when it is first asked for."""

    def __init__(self, *given: Mapping[str, list[Tensor]]) -> None:
        super().__init__(*given)
        self._coming: dict[str, Callable[[], Mapping[str, list[Tensor]]]] = {}

    def later(self, names: Sequence[str], finish: "Callable[[], Mapping[str, list[Tensor]]]") -> None:
        """These tensors come when `finish` is called; what they were before is let go."""
        for name in names:
            del self[name]
            self._coming[name] = finish

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self._coming

    def __getitem__(self, name: str) -> list[Tensor]:
        if name in self._coming:
            self._arrive(name)
        return super().__getitem__(name)

    def pop(self, name: str) -> list[Tensor]:  # type: ignore[override]  # a step knows what it asks for
        if name in self._coming:
            self._arrive(name)
        return super().pop(name)

    def settle(self) -> None:
        """Waits for everything, in the order in which it was sent."""
        while self._coming:
            self._arrive(next(iter(self._coming)))

    def _arrive(self, name: str) -> None:
        found = self._coming[name]()
        for other in found:
            del self._coming[other]
        self.update(found)
