"""Draft heads' checkpoints: read and written in the published layouts.

::

    load_head(path, target)   ->  LoadedHead(method, config, weights, conventions)
    load_mtp(target's path)   ->  the same, from tensors inside the target's checkpoint
    load_shared_draft_model(path, target, tokenizer)
                              ->  a draft model between the target's own ends
    write_eagle3(...)         ->  a new folder in the SafeAILab or the speculators layout
    eagle3_files, mtp_files, medusa_files, draft_model_files
                              ->  HeadFiles: the same to be written by others
    completed(...)            ->  with what it has from its target, for one that stands alone

    load                            recognises the kind, refuses the others by name
    eagle3, eagle3_config           SafeAILab, SpecForge, speculators, vLLM
    medusa, mtp                     one file per family
    vocabulary_map                  d2t and t2d, compared at load
    source, loaded                  files in, LoadedHead out
    draft_model                     draft models, with ends of their own or without
    complete                        what a head takes from its target, put in
    write, write_others             EAGLE-3; MTP and MEDUSA
    folder, hf_fields               whole folders or none; config.json
    shipped                         the heads in the package, by target

Where layouts differ in what the same field means, the translation is written down in
``LoadedHead.conventions``. Names, shapes, sizes and the vocabulary map are checked before a weight
is read; whatever is wrong is one error that names it.
"""

from __future__ import annotations

from outrider.models.loading.heads.complete import completed
from outrider.models.loading.heads.draft_model import (
    check_tokenizer,
    draft_model_files,
    load_shared_draft_model,
    recorded_acceptance,
    shares_ends,
)
from outrider.models.loading.heads.folder import HeadFiles
from outrider.models.loading.heads.load import is_draft_model, load_head
from outrider.models.loading.heads.loaded import LoadedHead
from outrider.models.loading.heads.mtp import has_mtp, load_mtp
from outrider.models.loading.heads.shipped import ShippedHead, shipped_head, shipped_heads
from outrider.models.loading.heads.write import LAYOUTS, eagle3_files, write_eagle3
from outrider.models.loading.heads.write_others import medusa_files, mtp_files

__all__ = [
    "LAYOUTS",
    "HeadFiles",
    "LoadedHead",
    "ShippedHead",
    "check_tokenizer",
    "completed",
    "draft_model_files",
    "eagle3_files",
    "has_mtp",
    "is_draft_model",
    "load_head",
    "load_mtp",
    "load_shared_draft_model",
    "medusa_files",
    "mtp_files",
    "recorded_acceptance",
    "shares_ends",
    "shipped_head",
    "shipped_heads",
    "write_eagle3",
]
