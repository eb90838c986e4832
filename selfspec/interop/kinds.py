"""Published drafters that selfspec does not import, so that none of them is taken for one that it does.

Their tensors resemble EAGLE's. What tells them apart is what EAGLE's heads never have.
"""

from __future__ import annotations

from dataclasses import dataclass

from selfspec.interop.files import Checkpoint


@dataclass(frozen=True)
class Kind:
    """One kind of drafter. Each attribute alone is enough to tell it.

    Attributes:
        keys: keys of the config that are only there, or only true, in this kind.
        architecture: a part of its class's name, in lower case.
        tensors: beginnings of names.
    """

    name: str
    keys: tuple[str, ...] = ()
    architecture: str = ""
    tensors: tuple[str, ...] = ()

    def is_in(self, checkpoint: Checkpoint) -> bool:
        classes = " ".join(map(str, checkpoint.config.get("architectures") or ())).lower()
        return (
            any(checkpoint.config.get(key) for key in self.keys)
            or bool(self.architecture and self.architecture in classes)
            or any(name.removeprefix("model.").startswith(self.tensors) for name in checkpoint.tensors)
        )


# Those that extend another kind come before it.
KINDS = (
    Kind("DSpark", ("markov_rank",), "dspark", ("markov_head.", "confidence_head.")),
    Kind("DFlash", ("dflash_config",), "dflash", ("hidden_norm.",)),
    Kind("P-EAGLE", ("parallel_drafting",), "peagle", ("mask_hidden",)),
)


def check_kind(checkpoint: Checkpoint) -> None:
    """Raise a ValueError that names the kind if the checkpoint is of one that selfspec does not import."""
    kind = checkpoint.config.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        raise checkpoint.refuse(f"speculators_model_type is {kind!r}, and selfspec reads eagle3 in this format")
    for each in KINDS:
        if each.is_in(checkpoint):
            raise checkpoint.refuse(f"it is a {each.name} drafter, and selfspec imports Medusa and EAGLE heads alone")
