outrider: reading hf
outrider: loading weights
