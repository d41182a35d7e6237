"""monotile in Hugging Face Transformers: `attn_implementation="monotile"` for every model that takes `sdpa`.

import monotile.transformers

monotile.transformers.register()
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="monotile")
"""

from __future__ import annotations

import inspect

from ..errors import BadOption
from .forward import attention_forward
from .masks import make_mask

__all__ = ["register"]


def register(name: str = "monotile") -> None:
    """Make `name` an attention implementation of Transformers, for models that are loaded or switched to it later."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    if "q_offset" not in inspect.signature(sdpa_mask).parameters:
        raise BadOption(
            "this version of Transformers describes masks in another way than monotile reads them (its sdpa_mask has "
            "no q_offset); install transformers>=5"
        )
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, make_mask)
