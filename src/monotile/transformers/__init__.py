"""monotile in Hugging Face Transformers: `attn_implementation="monotile"` for every model that takes `sdpa`.

import monotile.transformers

monotile.transformers.register()
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="monotile")
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

from ..errors import BadOption
from .forward import attention_forward
from .masks import make_mask
from .paged import NAME, continuous_batching, paged_forward

__all__ = ["continuous_batching", "register"]
_names: set[str] = set()  # that are registered


def register(name: str = "monotile") -> None:
    """Make `name` an attention implementation of Transformers, for models that are loaded or switched to it later."""
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    from transformers.masking_utils import flash_attention_mask, sdpa_mask

    if "q_offset" not in inspect.signature(sdpa_mask).parameters:
        raise BadOption(
            "this version of Transformers describes masks in another way than monotile reads them (its sdpa_mask has "
            "no q_offset); install transformers>=5"
        )
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, make_mask)
    AttentionInterface.register(NAME, paged_forward)
    AttentionMaskInterface.register(NAME, flash_attention_mask)
    if not _names:
        PreTrainedModel.get_correct_attn_implementation = _checked(PreTrainedModel.get_correct_attn_implementation)
    _names.add(name)


def _checked(check: Any) -> Any:
    """Transformers' check of an implementation that a model is asked for, with an error for models that look it up in a
    table of their own classes: built with another name they raise a KeyError, switched to it they go on with eager."""

    @functools.wraps(check)
    def get_correct_attn_implementation(self: Any, requested_attention: str | None, *args: Any, **options: Any) -> Any:
        if requested_attention in _names:
            for known in _own_tables(type(self)):
                cure = 'load it with "sdpa" and run it in a region of monotile.torch.sdpa()'
                raise BadOption(
                    f"{type(self).__name__} chooses its attention from a table of its own, {', '.join(known)}; "
                    + (cure if "sdpa" in known else 'load it with attn_implementation="eager"')
                )
        return check(self, requested_attention, *args, **options)

    return get_correct_attn_implementation


def _own_tables(model: type) -> list[dict[str, type]]:
    """Return the tables of attention classes by implementation in the module of a model."""
    names = vars(sys.modules[model.__module__])
    return [table for name, table in names.items() if name.endswith("ATTENTION_CLASSES") and isinstance(table, dict)]
