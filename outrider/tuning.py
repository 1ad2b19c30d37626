"""`outrider tune --estimate`: what a drafter, or the one of a recipe, must reach here."""

from pathlib import Path

from infer.estimate import Estimate
from infer.target import DType


def run_estimate(spec: str, target: str | None, dtype: DType, device: str | None) -> Estimate:
    """The estimate of a drafter's folder or hub id, or of a training recipe (a YAML file)."""
    from infer.estimate import estimate
    from infer.opening import bind_drafter, open_target, read_drafter

    if spec.endswith((".yaml", ".yml")):
        return _of_recipe(Path(spec), target, dtype, device)
    found = read_drafter(spec)
    model = open_target([found], target, dtype, device)
    checkpoint = bind_drafter(found, spec, model)
    rates = checkpoint.calibration.get("accuracies_HK")
    return estimate(spec, model, checkpoint.drafter, rates[0][0] if rates else None)


def _of_recipe(path: Path, target: str | None, dtype: DType, device: str | None) -> Estimate:
    """Of the drafter as the recipe's run would start it."""
    import torch

    from heads.base import drafter_class
    from heads.schema import load_recipe
    from heads.vocab import VocabMap
    from infer.estimate import estimate
    from infer.opening import open_target
    from train.recipe import Recipe, load_training_recipe

    kind = load_recipe(Recipe, path).drafter.get("kind", path.stem)
    recipe = load_training_recipe(kind, path, [])
    model = open_target([], target or recipe.target.name, dtype, device)
    config, vocab = recipe.drafter_config(kind), None
    if config.draft_vocab_size:
        ids = torch.arange(config.draft_vocab_size)
        vocab = VocabMap(ids, model.identity.vocab_size)
    drafter = drafter_class(kind).create(config, model.identity, model.shared, vocab)
    drafter.to(device=model.device, dtype=model.dtype).eval()
    drafter.bind(model.shared)
    return estimate(str(path), model, drafter)
