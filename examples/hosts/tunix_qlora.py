"""Tunix: QLoRA on packed weights. Its `PeftTrainer` trains adapters of one of its models beside codes of NF4.

    pip install --no-deps google-tunix==0.1.7 google-metrax==0.2.4 clu==0.0.12
    pip install qwix jaxtyping perfetto sentencepiece tensorboardX huggingface_hub pandas wrapt
    python examples/hosts/tunix_qlora.py

A loop by hand trains the same adapters beside float weights with the same numbers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.models.llama3 import model as llama3
from tunix.sft import hooks, peft_trainer

import jchop as jc

STEPS = 10
RULE = {"module_path": ".*q_proj|.*kv_proj|.*gate_proj|.*up_proj|.*down_proj", "rank": 4, "alpha": 8.0}
SIZES = {"num_layers": 2, "vocab_size": 64, "embed_dim": 32, "hidden_dim": 64, "num_heads": 2, "head_dim": 16}
CONFIG = llama3.ModelConfig(**SIZES, num_kv_heads=1, rope_theta=10_000, norm_eps=1e-5)


def inputs_of(batch):
    tokens = batch.input_tokens
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool)), (*tokens.shape, tokens.shape[1]))
    given = {"input_tokens": tokens, "input_mask": batch.input_mask, "positions": positions}
    return given | {"attention_mask": mask}


def adapted_model(pack):
    """The model with adapters on weights that are packed, or on the same numbers as floats."""
    model = llama3.Llama3(CONFIG, rngs=nnx.Rngs(0))
    given = inputs_of(next(batches()))
    call = (given["input_tokens"], given["positions"], None, given["attention_mask"])
    rule = RULE | {"weight_qtype": "nf4", "tile_size": 16}
    packed = jc.nn.quantize(model, jc.Rule.from_qwix(rule), mode="ptq", inputs=call)
    base = packed if pack else jc.dequantize(packed)
    return jc.nn.add_lora(base, jc.nn.LoraRule.from_qwix(RULE), inputs=call, rngs=nnx.Rngs(1))


def batches():
    for seed in range(STEPS):
        tokens = np.random.default_rng(seed % 2).integers(0, 64, (4, 16))
        yield peft_trainer.TrainingInput(input_tokens=tokens, input_mask=np.ones_like(tokens))


class Losses(hooks.TrainingHooks):
    """Keeps the loss of each step."""

    def __init__(self):
        self.found = []

    def on_train_step_end(self, train_ctx, train_step, train_loss):
        self.found.append(float(train_loss))

    on_train_start = on_train_end = on_train_step_start = on_eval_step_start = on_eval_step_end = lambda *given: None


def by_hand():
    """The losses of the same training, without Tunix's trainer and without codes."""
    model = adapted_model(pack=False)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)

    def loss(model, input_tokens, input_mask, positions, attention_mask):
        logits, _ = model(input_tokens, positions, None, attention_mask)
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], input_tokens[:, 1:]).mean()

    @nnx.jit
    def step(model, optimizer, given):
        value, gradients = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model, **given)
        optimizer.update(model, gradients)
        return value

    return [float(step(model, optimizer, inputs_of(batch))) for batch in batches()]


def main():
    model, seen = adapted_model(pack=True), Losses()
    config = peft_trainer.TrainingConfig(eval_every_n_steps=100, max_steps=STEPS, data_sharding_axis=())
    trainer = peft_trainer.PeftTrainer(model, optax.adam(1e-2), config).with_gen_model_input_fn(inputs_of)
    trainer.with_training_hooks(seen)
    trainer.train(batches())
    hand = by_hand()
    print(f"losses of {STEPS} steps: {seen.found[0]:.4f} to {seen.found[-1]:.4f}")
    print("largest difference from the losses by hand:", max(abs(a - b) for a, b in zip(seen.found, hand, strict=True)))
    sizes = [sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(adapted_model(pack)))) for pack in (True, False)]
    print(f"bytes of the model: {sizes[0]:,}; of its floats: {sizes[1]:,}")
    return seen.found, hand, sizes


if __name__ == "__main__":
    main()
