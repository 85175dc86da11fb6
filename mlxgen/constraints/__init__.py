"""What may come next: grammars, healing of a prompt's end, bans; all of them functions of the reply's ids so far."""

from mlxgen.constraints.grammar import Grammar, GrammarConstraint
from mlxgen.constraints.healing import Healing, HealingConstraint, healing_at_end, healing_of
from mlxgen.constraints.masks import BanConstraint, allowed_by, banned_mask, is_done, masked, permits
from mlxgen.constraints.protocol import Constraint

__all__ = [
    "BanConstraint",
    "Constraint",
    "Grammar",
    "GrammarConstraint",
    "Healing",
    "HealingConstraint",
    "allowed_by",
    "banned_mask",
    "healing_at_end",
    "healing_of",
    "is_done",
    "masked",
    "permits",
]
