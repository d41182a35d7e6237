"""monotile in Hugging Face Transformers: `attn_implementation="monotile"` for every model that takes `sdpa`.

import monotile.transformers

monotile.transformers.register()
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="monotile")
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from ..errors import BadOption
from .forward import attention_forward
from .masks import make_mask
from .paged import NAME, continuous_batching, paged_forward
from .replaceable import check_model

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
        for method in ("get_correct_attn_implementation", "set_attn_implementation"):
            setattr(PreTrainedModel, method, _checked(getattr(PreTrainedModel, method)))
    _names.add(name)


def _checked(method: Any) -> Any:
    """A method of Transformers' models that takes an implementation when they are loaded or switched, with an error for
    models that would go on with attention of their own."""

    @functools.wraps(method)
    def checked(self: Any, *args: Any, **options: Any) -> Any:
        given = inspect.signature(method).bind(self, *args, **options).args
        requested = given[1].get("") if isinstance(given[1], dict) else given[1]
        if requested in _names:
            check_model(self)
        return method(self, *args, **options)

    return checked
