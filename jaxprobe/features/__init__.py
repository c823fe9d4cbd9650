"""Signals as the encoders read them: out of the store, standardised, families apart.

The order of axes changes four times between the store and a fusion head:

| array                     | axes                                  | why              |
| ------------------------- | ------------------------------------- | ---------------- |
| rows of a stored family   | n_tokens_total, channels              | ragged           |
| `Features.tokens`         | n_examples, n_span_tokens, d_total    | padded spans     |
| `FamilyTokens.tokens`     | n_tokens, n_examples, d_family        | one gather each  |
| activations of an encoder | d, n_span_tokens, n_examples          | `kernels.masked` |
| `MemberOutputs.pooled`    | n_members, n_examples, d_pooled       | rows of the disk |
| `PoolOutputs.outputs`     | n_seeds, n_pool, d_output, n_examples | batches: slices  |
"""
