"""Programs that load a repository of ci/hub.py by the ``kernels`` library, each for a process of its own."""

from __future__ import annotations

#: Without the wheel and without rich. The argument is a variant's folder, with archives.
ALONE = """
import contextlib, io, json, sys
from pathlib import Path


class Hide:
    names = {"scan_registry", "rich"}

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def call(*words):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        status = kernel.cli.main(words)
    return status, out.getvalue()


sys.meta_path.insert(0, Hide())
import kernels
import torch

folder = Path(sys.argv[1])
kernel = kernels.get_local_kernel(folder)
gates, tokens = torch.rand(2, 9), torch.randn(2, 9, requires_grad=True)
states = kernel.linear_scan(gates, tokens)
states.sum().backward()
expected, state = [], torch.zeros(2)
for gate, token in zip(gates.T, tokens.detach().T):
    state = gate * state + token
    expected.append(state)

without_rich = call("inspect")
Hide.names.discard("rich")
answers = {words[0]: call(*words) for words in (["inspect"], ["selftest", "--device", "cpu", "--family", "roofline", "--family", "causal_conv1d"])}

import importlib

part = lambda name: importlib.import_module(f"{kernel.__name__}.{name}")
binary = next(b for a in kernel.catalogue().archives for b in a.binaries if b.variant.language == "triton")
worker = part("aot.worker")
worker._START = f"import scan_registry; assert {str(folder)!r} in scan_registry.__file__; {worker._START}"
compiled, content = worker.compile_apart(binary.variant, binary.target)

print(json.dumps({
    "name": kernel.__name__,
    "error": (states - torch.stack(expected, 1)).abs().max().item(),
    "gradient": tokens.grad is not None,
    "layers": sorted(kernel.layers.__all__),
    "operators": sorted({n.partition(":")[0] for n in torch._C._dispatch_get_all_op_names() if "scan_registry" in n}),
    "modules": sorted({n.partition(".")[0] for n in sys.modules if n.startswith("scan_registry")}),
    "without rich": without_rich,
    "answers": answers,
    "shipped": [binary.sha256, binary.source_sha256],
    "compiled": [compiled.sha256, compiled.source_sha256],
}))
"""

#: Beside the wheel. The arguments are a repository and a device.
BESIDE = """
import contextlib, json, sys
from pathlib import Path

import kernels
import torch
from kernels import LocalLayerRepository, Mode

import scan_registry

repository, device = Path(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
kernel = kernels.get_local_kernel(repository)
gates, tokens = torch.rand(2, 9, 50, device=device), torch.randn(2, 9, 50, device=device)


def results(package):
    x = tokens.clone().requires_grad_()
    y = package.linear_scan(gates, x)
    y.square().sum().backward()
    return y.detach(), x.grad


first, second, third = results(kernel), results(scan_registry), results(kernel)
same = all(torch.equal(a, b) and torch.equal(b, c) for a, b, c in zip(first, second, third))

from transformers import Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
from transformers.utils.kernel_config import KernelConfig

shared = dict(vocab_size=50, hidden_size=32, num_hidden_layers=1, pad_token_id=0, bos_token_id=1, eos_token_id=None)
MODELS = {
    "mamba": (MambaForCausalLM, MambaConfig(state_size=8, **shared)),
    "mamba2": (Mamba2ForCausalLM, Mamba2Config(num_heads=8, head_dim=8, state_size=8, n_groups=2, **shared)),
}
CONV = ["causal_conv1d_fn", "causal_conv1d_update"]
LAYERS = {
    "mamba": [*CONV, "selective_scan_fn", "selective_state_update"],
    "mamba2": [*CONV, "mamba_chunk_scan_combined", "selective_state_update"],
}


def kernelize(model, names):
    if device == "cuda":  # transformers takes mappings for GPUs alone
        mapping = {name: f"{repository}:{name}" for name in names}
        model.set_use_kernels(True, KernelConfig(mapping, use_local_kernel=True))
        return
    mapping = {name: {device: LocalLayerRepository(repository, layer_name=name)} for name in names}
    with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
        kernels.kernelize(model, mode=Mode.INFERENCE, device=device)


def replaced(module):
    forwards = {name: f.forward for name, f in getattr(module, "_kernel_funcs", {}).items()}
    return sorted(n for n, f in forwards.items() if f.__func__.__module__.startswith(kernel.__name__))


answers = {}
ids = torch.randint(1, 50, (2, 11), device=device)
for name, (build, config) in MODELS.items():
    model = build(config).to(device).eval()
    options = dict(max_new_tokens=3, do_sample=False, attention_mask=torch.ones_like(ids))
    with torch.no_grad():
        before, text = model(ids).logits, model.generate(ids, **options)
        kernelize(model, LAYERS[name])
        after, same_text = model(ids).logits, torch.equal(text, model.generate(ids, **options))
    mixers = [m for m in model.modules() if hasattr(m, "_kernel_funcs")]
    answers[name] = {"error": (before - after).abs().max().item(), "text": same_text, "replaced": replaced(mixers[0])}

norm = torch.nn.Sequential(Qwen3NextRMSNormGated(16)).to(device)
x, gate = torch.randn(2, 3, 16, device=device)[:, None]
before = norm[0](x, gate)
mapping = {"RMSNormGated": {device: LocalLayerRepository(repository, layer_name="RMSNormGated")}}
with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
    kernels.kernelize(norm, mode=Mode.TRAINING | Mode.TORCH_COMPILE, device=device)
answers["norm"] = {
    "error": (before - norm[0](x, gate)).abs().max().item(),
    "replaced": norm[0].forward.__func__.__module__.startswith(kernel.__name__),
}
model = MODELS["mamba"][0](MODELS["mamba"][1]).to(device)
step = LocalLayerRepository(repository, layer_name="selective_state_update")
try:
    with kernels.use_kernel_mapping({"selective_state_update": {device: {Mode.TRAINING: step}}}, inherit_mapping=False):
        kernels.kernelize(model, mode=Mode.TRAINING, device=device)
except ValueError as error:
    answers["training"] = str(error)

scan = kernel.layers.selective_scan_fn()
u, dt, A = torch.randn(1, 4, 6, device=device), torch.rand(1, 4, 6, device=device), -torch.rand(4, 8, device=device)
B = torch.randn(1, 8, 6, device=device)
compiled = torch.compile(scan, backend="aot_eager", fullgraph=True)
answers["compiled"] = (compiled(u, dt, A, B, B) - scan(u, dt, A, B, B)).abs().max().item()
if device == "cuda":
    with contextlib.redirect_stdout(sys.stderr):
        answers["selftest"] = kernel.cli.main(["selftest", "--device", device])
print(json.dumps({
    "same": same,
    "variant": Path(kernel.__file__).parents[1].name,
    "files": [kernel.__file__, scan_registry.__file__],
    "models": answers,
}))
"""

#: Through JAX. The arguments are a repository, and whether the wheel is there, too.
JAX = """
import importlib, json, sys
from pathlib import Path

repository, beside = Path(sys.argv[1]), sys.argv[2] == "beside"


class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "scan_registry":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


if not beside:
    sys.meta_path.insert(0, Hide())
import jax
import jax.numpy as jnp
import kernels
import numpy as np

jax.config.update("jax_disable_most_optimizations", True)  # compiling takes longer than running
kernel = kernels.get_local_kernel(repository)
packages = [kernel]
if beside:
    import scan_registry

    packages = [kernel, scan_registry, kernel]
keys = jax.random.split(jax.random.key(0), 4)
u, delta, gates = (jax.random.uniform(key, (2, 4, 50)) for key in keys[:3])
A, B = -jnp.ones((4, 3)), jax.random.normal(keys[3], (2, 3, 50))
CALLS = {
    "linear_scan": lambda f, u: f(gates, u),
    "rg_lru": lambda f, u: f(u, delta, gates, jnp.ones(4)),
    "selective_scan": lambda f, u: f(u, delta, A, B, B),
    "ssd_scan": lambda f, u: f(u.swapaxes(1, 2)[..., None], delta.swapaxes(1, 2), A[:, 0], B.swapaxes(1, 2)[:, :, None], B.swapaxes(1, 2)[:, :, None]),
    "causal_conv1d": lambda f, u: f(u, jnp.ones((4, 3))),
}


def results(package, compiled):
    wrap = jax.jit if compiled else lambda f: f
    answers = []
    for name, call in CALLS.items():
        function = getattr(package.jax, name)
        loss = wrap(jax.value_and_grad(lambda u: (call(function, u) ** 2).sum()))
        answers += loss(u)
    return [np.asarray(x).tolist() for x in answers]


every = [results(package, compiled) for compiled in ((True,) if beside else (False, True)) for package in packages]


def step(state, inputs):
    state = inputs[0] * state + inputs[1]
    return state, state


along = [jnp.moveaxis(x, 2, 0) for x in (gates, u)]
loss = jax.value_and_grad(lambda u: (jax.lax.scan(step, jnp.zeros((2, 4)), (along[0], u))[1] ** 2).sum())
value, grad = loss(along[1])
ours = [np.asarray(x) for x in every[0][:2]]
explained = [p.explain(p.jax.linear_scan, gates, u) for p in packages]
print(json.dumps({
    "name": kernel.__name__,
    "explained": [e.operator for e in explained],
    "modules": sorted({n.partition(".")[0] for n in sys.modules if n.startswith("scan_registry")}),
    "of": kernel.jax.linear_scan.__module__.partition(".")[0],
    "targets": [importlib.import_module(f"{p.__name__}.jax.ffi").TARGET for p in packages[:2]],
    "same": [all(a == b for a, b in zip(e, every[i // len(packages) * len(packages)])) for i, e in enumerate(every)],
    "spread": max(float(abs(np.subtract(a, b)).max()) for e in every for a, b in zip(e, every[0])),
    "error": [float(abs(ours[0] / value - 1)), float(abs(ours[1] - np.moveaxis(grad, 0, 2)).max())],
}))
"""
