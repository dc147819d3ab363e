"""Links and factors that built-in optimizers share, from the config."""

from collections.abc import Callable
from typing import NamedTuple

import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import PyTree

from jaxforge.config.model import ModelConfig
from jaxforge.config.optimizer import OptimizerConfig
from jaxforge.model import mup
from jaxforge.model.linear import is_matrix
from jaxforge.optim.chain import Factors, Links, decay_weights, scale_by_factors, scale_by_rate
from jaxforge.optim.moments import MomentStorage
from jaxforge.parallel.sharding import Axes

FactorOfShape = Callable[[tuple[int, ...], Axes], float]
"""(shape, logical axes) -> factor of a parameter."""


class Parts(NamedTuple):
    """Arguments of the builder of a built-in optimizer, which returns its links of the chain.

    Methods that take `group`, a further factor on the learning rates of some parameters, apply it
    in addition to `lr_patterns`.

    Attributes:
        optimizer: the `[optimizer]` section.
        model: the `[model]` section, for the factors of muP.
        axes: logical axes of every parameter.
        storage: storage format of moments.
    """

    optimizer: OptimizerConfig
    model: ModelConfig
    axes: PyTree
    storage: MomentStorage

    @property
    def eps(self) -> float:
        """Adam's epsilon, which shrinks with the gradients (`model.mup`)."""
        return self.optimizer.eps * mup.output_multiplier(self.model)

    def scaling(
        self, of_mup: FactorOfShape | None = None, group: FactorOfShape | None = None
    ) -> Links:
        """Return the links that multiply directions by the factors of muP and by the rate.

        Args:
            of_mup: factor of muP; by default that of Adam and Lion.
            group: factor on the learning rate.
        """

        def mup_factor(name: str, shape: tuple[int, ...], axes: Axes) -> float:
            return of_mup(shape, axes) if of_mup else mup.lr_factor(self.model, axes)

        def lr_factor(name: str, shape: tuple[int, ...], axes: Axes) -> float:
            return self._lr_factor(name, shape, axes, group)

        mup_factors, lr_factors = map(self._tree_of, (mup_factor, lr_factor))
        return [scale_by_factors(mup_factors), scale_by_rate(lr_factors)]

    def change_factors(self) -> optax.GradientTransformation:
        """Return the link that multiplies changes by the factors of muP and of `lr_patterns`."""
        return scale_by_factors(
            self._tree_of(
                lambda name, shape, axes: (
                    mup.lr_factor(self.model, axes) * self.optimizer.lr_factor(name)
                )
            )
        )

    def decay(self, group: FactorOfShape | None = None) -> optax.GradientTransformationExtraArgs:
        """Return the link of weight decay."""
        return decay_weights(self.decays(group), is_cautious=self.optimizer.cautious_weight_decay)

    def decays(self, group: FactorOfShape | None = None) -> Factors:
        """Return the weight decay of each parameter times its factor on the learning rate.

        PyTorch multiplies the decay of a parameter group by the learning rate of the group.
        """

        def decay(name: str, shape: tuple[int, ...], axes: Axes) -> float:
            is_decayed = self.optimizer.decays(name, is_matrix=is_matrix(axes))
            factor = self._lr_factor(name, shape, axes, group)
            return self.optimizer.weight_decay * factor * is_decayed

        return self._tree_of(decay)

    def _lr_factor(
        self, name: str, shape: tuple[int, ...], axes: Axes, group: FactorOfShape | None
    ) -> float:
        return self.optimizer.lr_factor(name) * (group(shape, axes) if group else 1.0)

    def _tree_of(self, factor: Callable[[str, tuple[int, ...], Axes], float]) -> Factors:
        """Return the function from a tree of arrays to factors by name, shape and axes."""
        axes = flatten_dict(self.axes)

        def factors(tree: PyTree) -> PyTree:
            flat = flatten_dict(tree).items()
            return unflatten_dict(
                {path: factor(".".join(path), leaf.shape, axes[path]) for path, leaf in flat}
            )

        return factors
