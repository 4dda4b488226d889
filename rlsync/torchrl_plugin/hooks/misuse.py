"""The errors of hooks that are registered in a way in which they could do nothing."""

from __future__ import annotations

from torchrl.trainers import TrainerHookBase

from rlsync.core.errors import ConfigError


def no_trainer(hook: object, or_else: str = "") -> ConfigError:
    """The error of a hook that was called before it met its trainer.

    TorchRL calls an operation without telling it for which trainer, so a hook cannot bind itself at its first
    call.

    Args:
        hook: the hook.
        or_else: another cure than ``register``, if the hook has one; ends in ", or ".
    """
    name = type(hook).__name__
    return ConfigError(
        f"this {name} has no trainer yet, so it can do nothing",
        f"{name}, called before it was bound to a trainer",
        f"{or_else}call hook.register(trainer) in place of trainer.register_op(stage, hook)",
    )


def refuse_arguments(hook: object, given: tuple[object, ...]) -> None:
    """Refuse the arguments of a stage at which the hook has no place.

    Raises:
        ConfigError: there are arguments.
    """
    if given:
        name = type(hook).__name__
        raise ConfigError(
            f"this {name} takes no arguments, and was called with {type(given[0]).__name__}",
            f"the stage at which {name} is registered",
            "register it at a stage without arguments (post_steps, post_optim or post_epoch), "
            "or call hook.register(trainer), which chooses one",
        )


class RegistersItself(TrainerHookBase):
    """A hook that ``register_op`` cannot register, because it works in several places."""

    def __call__(self, *given: object) -> None:
        """Refuse to be an operation.

        Raises:
            ConfigError: always.
        """
        name = type(self).__name__
        raise ConfigError(
            f"{name} is not an operation of one stage",
            f"trainer.register_op(stage, {name}(...))",
            "call hook.register(trainer) instead: it registers what is needed at each stage",
        )
