"""A network whose last layer is a head with a margin."""

from torch import Tensor, nn

from dcnet.losses import MarginSoftmax
from dcnet.models.blocks import Network


class MarginNetwork(nn.Module):
    """Logits of images, and with labels the loss of the head as well.

    Args:
        body: a network that ends with its features, made with num_classes=0.
        head: takes as many features as there are.
        features: how many the body's are brought down to by a linear layer; None to leave them as they are.
    """

    def __init__(self, body: Network, head: MarginSoftmax, features: int | None = None):
        super().__init__()
        self.body, self.head = body, head
        self.num_features = features or body.num_features
        self.embedding = nn.Identity() if features is None else nn.Linear(body.num_features, features)
        if head.in_features != self.num_features:
            raise ValueError(f"the head takes {head.in_features} features, and the network gives {self.num_features}")

    def features(self, input: Tensor) -> Tensor:
        """What the head sees: [N, C, H, W] -> [N, num_features]."""
        return self.embedding(self.body(input))

    def forward(self, input: Tensor, labels: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """The logits, without any margin; with labels the loss with it, and the logits."""
        features = self.features(input)
        if labels is None:
            return self.head.logits(features)
        return self.head(features, labels), self.head.logits(features)
