"""Small models of further libraries, for the table of `small_models`; those that are not installed are skipped."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.jax.importing.libraries import drawn as filled
from tests.jax.importing.small_models import SEQUENCE, D, X, drawn, model


def of_haiku(function: Any, x: Any, state: bool = False) -> tuple[Any, tuple[Any, ...]]:
    """The loss of a Haiku function, and its parameters and data."""
    import haiku as hk
    import jax

    network = hk.without_apply_rng((hk.transform_with_state if state else hk.transform)(function))
    shapes = jax.eval_shape(lambda: network.init(jax.random.key(0), x))
    if state:
        params, others = map(filled, shapes)
        return lambda params, x: (network.apply(params, others, x)[0] ** 2).mean(), (params, x)
    return lambda params, x: (network.apply(params, x) ** 2).mean(), (filled(shapes), x)


@model("haiku", x="batch length d")
def haiku_attention():
    import haiku as hk

    def network(x):
        h = hk.MultiHeadAttention(2, 3, w_init=hk.initializers.VarianceScaling())(x, x, x)
        return hk.nets.MLP([8, D])(hk.LayerNorm(-1, True, True)(x + h))

    return of_haiku(network, SEQUENCE)


@model("haiku", x="length batch d")
def haiku_recurrent():
    import haiku as hk

    def network(x):
        core = hk.DeepRNN([hk.LSTM(8), hk.GRU(8)])
        return hk.dynamic_unroll(core, x, core.initial_state(x.shape[1]))[0]

    return of_haiku(network, drawn(5, 4, D))


@model("haiku", x="batch d")
def haiku_quantised():
    import haiku as hk

    def network(x):
        q = hk.nets.VectorQuantizer(8, D, 0.25)(hk.Linear(8)(x), True)
        return hk.Linear(D)(q["quantize"]) - x + q["loss"]

    return of_haiku(network, X, state=True)


@model("distrax", x="batch d", p__w="d wide")
def distrax_flow():
    import distrax
    import jax.numpy as jnp

    def loss(p, x):
        base = distrax.Independent(distrax.Normal(jnp.zeros(8), jnp.ones(8)), 0)
        flow = distrax.Transformed(base, distrax.ScalarAffine(p["shift"], log_scale=p["scale"]))
        spline = distrax.RationalQuadraticSpline(p["spline"], -3.0, 3.0)
        return -flow.log_prob(x @ p["w"]).mean() + spline.forward_and_log_det(x)[1].sum()

    return loss, ({"w": drawn(D, 8), "shift": drawn(8), "scale": drawn(8), "spline": drawn(D, 13)}, X)


@model("distrax", x="batch d")
def distrax_mixture():
    import distrax
    import jax.numpy as jnp

    def loss(p, x):
        parts = distrax.MultivariateNormalDiag(p["means"], jnp.exp(p["scales"]))
        mixture = distrax.MixtureSameFamily(distrax.Categorical(logits=p["logits"]), parts)
        return -mixture.log_prob(x).mean() + distrax.Categorical(logits=x @ p["means"].T).entropy().mean()

    return loss, ({"logits": drawn(5), "means": drawn(5, D), "scales": drawn(5, D)}, X)


@model("numpyro", x="batch d")
def numpyro_regression():
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer.util import log_density

    def classes(x, y):
        w = numpyro.sample("w", dist.Normal(jnp.zeros(D), 1.0).to_event(1))
        b = numpyro.sample("b", dist.StudentT(3.0, 0.0, 1.0))
        with numpyro.plate("examples", x.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=x @ w + b), obs=y)

    def loss(p, x, y):
        return -log_density(classes, (x, y), {}, p)[0]

    return loss, ({"w": drawn(D), "b": drawn()}, X, np.array([0, 1, 1, 0]))


@model("rlax", x="batch d")
def rlax_policies():
    import jax
    import jax.numpy as jnp
    import rlax

    def loss(p, x, action, advantage):
        logits = x @ p["w"]
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], 1)[:, 0]
        clipped = rlax.clipped_surrogate_pg_loss(jnp.exp(chosen + 1), advantage, 0.2)
        values, atoms = (x @ p["q"]).reshape(4, 3, 5), jnp.linspace(-1, 1, 5)
        learn = jax.vmap(lambda q, a, r, t: rlax.categorical_q_learning(atoms, q, a, r, 0.9, atoms, t))
        return clipped + learn(values, action % 3, advantage, values[::-1]).mean()

    return loss, ({"w": drawn(D, 5), "q": drawn(D, 15)}, X, np.arange(4, dtype=np.int32), drawn(4))


@model("jraph", x="nodes d")
def jraph_attention():
    import jax
    import jax.numpy as jnp
    import jraph

    def loss(p, x):
        senders, receivers = jnp.array([0, 1, 2, 3, 0, 2]), jnp.array([1, 2, 3, 0, 2, 1])
        graph = jraph.GraphsTuple(x, None, receivers, senders, None, jnp.array([4]), jnp.array([6]))
        score = lambda s, r, e: jax.nn.leaky_relu(jnp.concatenate([s, r], -1) @ p["a"])  # noqa: E731
        return (jraph.GAT(lambda n: n @ p["q"], score, lambda n: n)(graph).nodes ** 2).sum()

    return loss, ({"q": drawn(D, 8), "a": drawn(16, 1)}, X)


@model("e3nn_jax", x="batch d")
def e3nn_products():
    import e3nn_jax as e3nn
    import jax.numpy as jnp

    def loss(p, x):
        harmonics = e3nn.spherical_harmonics("0e + 1o + 2e", x[:, 2:], True)
        product = e3nn.tensor_product(e3nn.IrrepsArray("2x0e + 1x1o", x), harmonics)
        return (jnp.tanh(product.array @ p["w"]) ** 2).sum()

    return loss, ({"w": drawn(45, 8)}, drawn(4, 5))


@model("diffrax", x="batch d", p__w="d wide")
def diffrax_equation():
    import diffrax
    import jax.numpy as jnp

    def loss(p, x):
        term = diffrax.ODETerm(lambda t, y, args: jnp.tanh(y @ p["w"]) @ p["v"])
        adjoint = diffrax.DirectAdjoint()
        return (diffrax.diffeqsolve(term, diffrax.Heun(), 0.0, 1.0, 0.5, x, adjoint=adjoint, max_steps=4).ys ** 2).sum()

    return loss, ({"w": drawn(D, 8), "v": drawn(8, D)}, X)


@model("lineax", x="batch d")
def lineax_systems():
    import jax.numpy as jnp
    import lineax as lx

    def loss(p, x):
        a = p["w"] @ p["w"].T + 2 * jnp.eye(D)
        direct = lx.linear_solve(lx.MatrixLinearOperator(a), p["b"], lx.LU()).value
        spd = lx.MatrixLinearOperator(a, lx.positive_semidefinite_tag)
        iterative = lx.linear_solve(spd, p["b"], lx.CG(rtol=1e-7, atol=1e-7, max_steps=12)).value
        return ((x @ direct) ** 2).sum() + (x @ iterative).sum()

    return loss, ({"w": drawn(D, 8), "b": drawn(D)}, X)


@model("penzai ordered_set", tokens="batch length")
def penzai_transformer():
    import jax
    import jax.numpy as jnp
    from penzai import pz
    from penzai.models.transformer.variants import llamalike_common as llama_like

    config = llama_like.LlamalikeTransformerConfig(
        num_kv_heads=2, query_head_multiplier=2, embedding_dim=8, projection_dim=4, mlp_hidden_dim=16,
        num_decoder_blocks=2, vocab_size=24, mlp_variant="geglu_approx", tie_embedder_and_logits=True,
        use_post_attn_norm=True, final_logit_softcap=30.0, use_layer_stack=True,
    )  # fmt: skip
    unbound, variables = pz.unbind_params(llama_like.build_llamalike_transformer(config, jax.random.key(0)))
    axes = {v.label: tuple(v.value.named_axes) for v in variables}

    def loss(params, tokens):
        values = {name: pz.nx.wrap(array).tag(*axes[name]) for name, array in params.items()}
        bound = [pz.ParameterValue(label=v.label, value=values[v.label], metadata=v.metadata) for v in variables]
        network = pz.bind_variables(unbound, bound)
        positions = pz.nx.wrap(jnp.arange(tokens.shape[1])).tag("seq")
        logits = network(pz.nx.wrap(tokens).tag("batch", "seq"), token_positions=positions)
        return -jax.nn.log_softmax(logits.unwrap("batch", "seq", "vocabulary"))[..., 1].mean()

    params = {v.label: v.value.unwrap(*axes[v.label]) for v in variables}
    return loss, (params, np.arange(24).reshape(4, 6))


@model("equimo loguru")
def equimo_vision_transformer():
    import equinox as eqx
    import jax
    from equimo.models.vit import VisionTransformer

    sizes = {"img_size": 16, "in_channels": 3, "dim": 8, "patch_size": 8, "num_heads": 2, "depths": [1]}
    network = eqx.nn.inference_mode(VisionTransformer(**sizes, num_classes=4, key=jax.random.key(0)))
    params, static = eqx.partition(network, eqx.is_inexact_array)

    def loss(params, image):
        return -jax.nn.log_softmax(eqx.combine(params, static)(image, key=jax.random.key(0)))[1]

    return loss, (params, drawn(3, 16, 16))


@model("transformers flax", tokens="batch length")
def hugging_face_flax_bert():
    import jax
    import transformers

    sizes = {"vocab_size": 24, "hidden_size": 8, "intermediate_size": 16, "max_position_embeddings": 8}
    config = transformers.BertConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    network = transformers.FlaxBertForMaskedLM(config, input_shape=(1, 6))

    def loss(params, tokens):
        return -jax.nn.log_softmax(network(tokens, params=params, train=False).logits)[..., 1].mean()

    return loss, (network.params, np.arange(24).reshape(4, 6))


@model("transformers flax", tokens="batch length")
def hugging_face_flax_bart():
    import jax
    import transformers

    layers = {f"{half}_{what}": n for half in ("encoder", "decoder") for what, n in
              (("layers", 1), ("attention_heads", 2), ("ffn_dim", 16))}  # fmt: skip
    config = transformers.BartConfig(vocab_size=24, d_model=8, max_position_embeddings=8, **layers)
    network = transformers.FlaxBartForConditionalGeneration(config, input_shape=(1, 6))

    def loss(params, tokens):
        logits = network(tokens, decoder_input_ids=tokens, params=params, train=False).logits
        return -jax.nn.log_softmax(logits)[..., 1].mean()

    return loss, (network.params, np.arange(24).reshape(4, 6))


@model("transformers flax")
def hugging_face_flax_resnet():
    import jax
    import transformers

    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
    network = transformers.FlaxResNetForImageClassification(config, input_shape=(1, 16, 16, 3))

    def loss(params, images):
        return -jax.nn.log_softmax(network(images, params=params, train=False).logits)[:, 1].mean()

    return loss, (network.params, drawn(4, 3, 16, 16))
