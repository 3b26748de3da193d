"""Names from NumPy, JAX, PyTorch and Mesh TensorFlow, and their counterparts here."""

from __future__ import annotations

# Attributes of arrays, and what to write for a tensor x.
OF_TENSORS = {
    "T": "mtf.transpose(x, ...); dims go by name, so einsum needs none",
    "astype": "mtf.cast(x, dtype)",
    "device": "a program is laid over a mesh by mtf.lower(y, mesh=..., layout=...)",
    "dot": "mtf.einsum([x, y], output_shape=...)",
    "dims": "x.shape",
    "max": "mtf.reduce_max(x, reduced_dim=...)",
    "mean": "mtf.reduce_mean(x, reduced_dim=...)",
    "mesh": "a program is laid over a mesh by mtf.lower(y, mesh=..., layout=...)",
    "min": "mtf.reduce_min(x, reduced_dim=...)",
    "ndim": "len(x.shape)",
    "numpy": "mtf.simulate(mtf.lower({'x': x})).step(...)['x']",
    "permute": "mtf.transpose(x, ...)",
    "prod": "mtf.reduce_prod(x, reduced_dim=...)",
    "size": "x.shape.size",
    "sum": "mtf.reduce_sum(x, reduced_dim=...)",
    "to": "mtf.cast(x, dtype)",
    "view": "mtf.reshape(x, ...)",
}
# Functions of Mesh TensorFlow and others.
OF_MODULES = {
    "Dataset": "mtf.Batches",
    "SimdMeshImpl": "mtf.lower(y, mesh=..., layout=...)",
    "Lowering": "mtf.lower",
    "get_variable": "mtf.variable",
    "grad": "mtf.gradients",
    "import_tf_tensor": "mtf.input",
    "jit": "mtf.lower",
    "max": "mtf.reduce_max",
    "mean": "mtf.reduce_mean",
    "min": "mtf.reduce_min",
    "placeholder": "mtf.input",
    "sum": "mtf.reduce_sum",
    "tensor": "mtf.constant or mtf.input",
    "zeros_like": "mtf.zeros(x.shape, x.dtype)",
}
# Arguments, and what to say to them.
OF_ARGUMENTS = {
    "axis": "dims go by name: reduced_dim=, output_shape= or dim=",
    "dims": "dims go by name: reduced_dim=, output_shape= or dim=",
    "keepdims": "dims that are gone come back by name, without ones",
    "mesh": "operations know no mesh: mtf.lower(y, mesh=..., layout=...)",
}
# NumPy's names of what goes by another name here.
OF_NUMPY = {
    "absolute": "abs",
    "concatenate": "concat",
    "true_divide": "divide",
    "sum": "reduce_sum",
    "prod": "reduce_prod",
    "power": "pow",
    "rint": "round",
}
