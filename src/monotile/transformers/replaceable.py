"""Models of Transformers whose attention cannot be replaced: they are refused when they are loaded, switched, or ask
for a mask."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, cast

from ..errors import BadOption


def check_model(model: Any) -> None:
    """Raise an error for a model that would not compute with an implementation registered by name."""
    kind, config = type(model), cast(Any, type(model.config))
    for known in _own_tables(kind):
        cure = 'load it with "sdpa" and run it in a region of monotile.torch.sdpa()'
        raise BadOption(
            f"{kind.__name__} chooses its attention from a table of its own, {', '.join(known)}; "
            + (cure if "sdpa" in known else 'load it with attn_implementation="eager"')
        )
    if not kind._can_set_attn_implementation() and _stands_alone(config):
        raise _computes_by_itself(kind)


@cache
def check_config(config: type) -> None:
    """Raise an error for a model whose attention cannot be replaced: it would read a LazyMask with another meaning."""
    for model in models_of(config):
        if not model._can_set_attn_implementation():
            raise _computes_by_itself(model)


def models_of(config: type) -> tuple[Any, ...]:
    """Return the classes of models that Transformers loads for a configuration."""
    from transformers import MODEL_MAPPING

    models: Any = MODEL_MAPPING.get(config, ())
    return tuple(models) if isinstance(models, tuple | list) else (models,)


def _computes_by_itself(model: type) -> BadOption:
    return BadOption(
        f"{model.__name__} computes attention by itself and takes no other implementation; load it, or this part of a "
        'model, with attn_implementation="eager"'
    )


def _own_tables(model: type) -> list[dict[str, type]]:
    """Return the tables of attention classes by implementation in the module of a model."""
    names = vars(sys.modules[model.__module__])
    return [table for name, table in names.items() if name.endswith("ATTENTION_CLASSES") and isinstance(table, dict)]


@cache
def _stands_alone(config: Any) -> bool:
    """True for the configuration of a model that Transformers loads by itself and that holds no other such model: what
    is put together of several may have parts that take an implementation."""
    from transformers import MODEL_MAPPING, AutoConfig

    parts = config.sub_configs.values()
    return config in MODEL_MAPPING and not any(part is AutoConfig or part in MODEL_MAPPING for part in parts)
