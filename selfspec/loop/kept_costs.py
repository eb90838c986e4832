"""Where a calibration's times are kept: one file for each card, target, drafter and version, beside the default target.

`SpecEngine.warm_up` writes it. Every later use of the same target on such a card then starts with known costs, also without
a warm-up. Invariant: a file that cannot be read or written changes nothing but speed.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from selfspec.files import cache_folder
from selfspec.loop.costs import Costs

if TYPE_CHECKING:
    from selfspec.loop.drafter import Drafter
    from selfspec.model.target import Target

logger = logging.getLogger(__name__)


def load_costs(target: Target, drafter: Drafter) -> Costs | None:
    """The costs that were kept for a target and a drafter; None where none were."""
    if not target.passes.is_captured:
        return None
    costs = Costs.load(_path(target, drafter), **_identity(target, drafter))
    return costs if costs.is_calibrated else None


def save_costs(costs: Costs, target: Target, drafter: Drafter) -> None:
    """Keep calibrated costs for the next start."""
    try:
        costs.save(_path(target, drafter), **_identity(target, drafter))
    except OSError as error:
        logger.debug("costs could not be kept: %s", error)


def _identity(target: Target, drafter: Drafter) -> dict[str, str]:
    # Not while the package is imported, because it imports this module.
    from selfspec import __version__

    shape = target.kv_shape
    sizes = f"{shape.num_layers} layers, {target.config.hidden_size} wide, {target.vocab_size} tokens, {target.dtype}"
    trees = f"{drafter.name}, {drafter.num_draft_tokens} deep, {drafter.most_nodes} nodes"
    card = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else target.device.type
    return {
        "card": card,
        "target": f"{target.name} ({sizes}), {trees}",
        "version": f"{__version__}, torch {torch.__version__}",
    }


def _path(target: Target, drafter: Drafter) -> Path:
    digest = hashlib.sha256("\n".join(_identity(target, drafter).values()).encode()).hexdigest()[:16]
    return cache_folder() / "costs" / f"{digest}.json"
