"""`auto`: the best shipped head that fits the target, or else prompt lookup."""

from pathlib import Path

import pytest
from support import eagle_head, tiny_target

from selfspec.drafters import NgramDrafter, load_drafter, shipped
from selfspec.drafters.names import KINDS
from selfspec.drafters.shipped import identity
from selfspec.drafters.specs import BEST, NAMES
from selfspec.heads.base import DraftHead
from selfspec.heads.medusa import MedusaConfig, MedusaHead
from selfspec.model.target import Target


@pytest.fixture
def ship(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts heads in the package's place, by the names given."""

    def ship(**heads: DraftHead) -> None:
        for name, head in heads.items():
            head.save_pretrained(tmp_path / "a-target" / name)
        monkeypatch.setattr(shipped, "shipped_heads", lambda: sorted(tmp_path.glob("*/*")))

    return ship


def medusa(target: Target) -> MedusaHead:
    return MedusaHead(MedusaConfig(target=identity(target), num_heads=2))


def test_the_best_head_that_fits_is_taken(ship, caplog):
    target = tiny_target()
    ship(medusa=medusa(target), eagle=eagle_head(target), other=eagle_head(tiny_target(seed=1)))
    caplog.set_level("INFO", logger="selfspec.drafters")
    drafter = load_drafter("auto", target, num_draft_tokens=2)
    assert drafter is not None and (drafter.name, drafter.num_draft_tokens) == ("eagle", 2)
    assert caplog.messages == ["drafter eagle: the shipped head a-target/eagle"]


def test_another_head_is_better_than_none(ship):
    target = tiny_target()
    ship(medusa=medusa(target), eagle=eagle_head(tiny_target(seed=1)))
    drafter = load_drafter("auto", target)
    assert drafter is not None and drafter.name == "medusa"


def test_without_a_head_that_fits_the_text_itself_is_looked_up(ship, caplog):
    ship(eagle=eagle_head(tiny_target(seed=1)))
    caplog.set_level("INFO", logger="selfspec.drafters")
    assert isinstance(load_drafter("auto", tiny_target()), NgramDrafter)
    [message] = caplog.messages
    assert message.startswith("drafter ngram: no shipped head fits ")


def test_every_drafter_with_heads_has_its_place():
    assert set(BEST) == {kind.name for kind in KINDS.values() if kind.heads}
    assert set(BEST) == {name.name for name in NAMES.values() if name.takes_path}


def test_auto_takes_no_argument():
    with pytest.raises(ValueError, match="drafter 'auto:eagle' takes no argument: write auto"):
        load_drafter("auto:eagle", tiny_target())
