"""Draft heads: small networks that read the target's hidden states; one file per method."""
