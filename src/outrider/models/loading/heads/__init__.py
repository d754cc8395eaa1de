"""Draft heads' checkpoints: read in every published layout, EAGLE-3 also written.

::

    load_head(path, target)   ->  LoadedHead(method, config, weights, conventions)
    load_mtp(target's path)   ->  the same, from tensors inside the target's checkpoint
    write_eagle3(...)         ->  a folder in the SafeAILab or the speculators layout

    load                            recognises the kind, refuses the others by name
    eagle3, eagle3_config           SafeAILab, SpecForge, speculators, vLLM
    medusa, mtp                     one file per family
    vocabulary_map                  d2t and t2d, compared at load
    source, loaded                  files in, LoadedHead out
    write                           EAGLE-3 out

Where layouts differ in what the same field means, the translation is written down in
``LoadedHead.conventions``. Names, shapes, sizes and the vocabulary map are checked before a weight
is read; whatever is wrong is one error that names it.
"""

from __future__ import annotations

from outrider.models.loading.heads.load import is_whole_model, load_head
from outrider.models.loading.heads.loaded import LoadedHead
from outrider.models.loading.heads.mtp import has_mtp, load_mtp
from outrider.models.loading.heads.write import LAYOUTS, write_eagle3

__all__ = [
    "LAYOUTS",
    "LoadedHead",
    "has_mtp",
    "is_whole_model",
    "load_head",
    "load_mtp",
    "write_eagle3",
]
