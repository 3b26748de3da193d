"""Embedding tables and lookups."""

from __future__ import annotations

from layouts import Dimension
from meshlib.core import initializers
from meshlib.core.graph import Tensor, find_dim
from meshlib.layers.numerics import DEFAULT, Numerics, as_numerics
from meshlib.ops.building import as_dim, tensor
from meshlib.ops.movement.indexing import gather


def embedding_weights(
    vocab_dim: Dimension,
    output_dim: Dimension,
    numerics: Numerics = DEFAULT,
    initializer: initializers.Initializer | float | None = None,
    name: str = "embedding",
) -> Tensor:
    """An embedding table for sharing: `mtf.layers.embedding(ids, ..., weights=table)`, and for logits
    `mtf.einsum([x, table], output_shape=[..., vocab])`.

    Args:
      vocab_dim, output_dim: dims of the table.
      numerics: dtypes of the table.
      initializer: by default normal with standard deviation 1, as in Mesh TensorFlow.
      name: name of the variable.
    Returns: [vocab_dim, output_dim].
    Example:
      >>> import meshlib as mtf
      >>> vocab, d_model = mtf.Dimension("vocab", 100), mtf.Dimension("d_model", 8)
      >>> with mtf.Graph():
      ...     ids = mtf.input("ids", [mtf.Dimension("length", 4)], "int32")
      ...     table = mtf.layers.embedding_weights(vocab, d_model)
      ...     x = mtf.layers.embedding(ids, vocab, d_model, weights=table)
      ...     logits = mtf.einsum([x, table], output_shape=[mtf.Dimension("length", 4), vocab])
      >>> print(x.shape, logits.shape)
      [length:4, d_model:8] [length:4, vocab:100]
    """
    what = "embedding_weights"
    dims = [as_dim(vocab_dim, what), as_dim(output_dim, what)]
    start = initializers.random_normal(0.0, 1.0) if initializer is None else initializer
    return as_numerics(numerics, what).variable(name, dims, start)


def embedding(
    indices: Tensor,
    vocab_dim: Dimension,
    output_dim: Dimension,
    numerics: Numerics = DEFAULT,
    initializer: initializers.Initializer | float | None = None,
    weights: Tensor | None = None,
    name: str = "embedding",
    out_of_range: str = "error",
) -> Tensor:
    """The row of a table [vocab_dim, output_dim] for each index.

    If `vocab_dim` is split, each device looks up indices in its block, and the results are summed over the devices.

    Args:
      indices: int32, without `vocab_dim` and `output_dim`.
      vocab_dim, output_dim: dims of the table.
      numerics, initializer: for a new table, as in `embedding_weights`.
      weights: the table, if it is shared.
      name: name of the variable, and scope of the `lookup`.
      out_of_range: for an invalid index: "error" raises, "zero" yields zeros as in Mesh TensorFlow.
    Returns: [dims of indices, output_dim] in the dtype of the table.
    Raises: ShapeError for indices that are not int32; FeedError at run time for an index out of range.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.layers.embedding(mtf.input("i", "n:2", "int32"), mtf.Dimension("vocab", 9), mtf.Dimension("d", 4))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(i=[2, 0])["y"].shape)
      (2, 4)
    """
    what = "embedding"
    tensor(indices, what)
    if weights is None:
        weights = embedding_weights(vocab_dim, output_dim, numerics, initializer, name)
    find_dim(tensor(weights, what), output_dim, what)
    vocab = find_dim(weights, vocab_dim, what)
    return gather(weights, indices, vocab, name=f"{name}/lookup", out_of_range=out_of_range)
