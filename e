outrider: error: max_total_draft_tokens: 2 breaks max_draft_len <= max_total_draft_tokens <= dynamic_tree_max_topK * max_draft_len; allowed here: 8 .. 8
