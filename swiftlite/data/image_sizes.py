"""`ImageSizes`: how a vision-language model divides an image into the inputs of its image tower."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ImageSizes:
    """The sizes of an image tower's inputs, and the tokens that stand for an image.

    An image is divided into patches. The tower computes one output for each group of `merge_size` x `merge_size`
    patches. In the text, an image is `vision_start`, one placeholder token per output, `vision_end`.

    Attributes:
        patch_size: width and height of a patch in pixels.
        temporal_patch_size: number of frames of a patch. An image has one frame, which is repeated.
        merge_size: width and height of a group in patches.
        channels: number of colors.
        image_token_id: the placeholder token.
        vision_start_id, vision_end_id: the tokens before and after the placeholders of an image; None without them.
        video_token_id: the placeholder token of videos; None without one.
    """

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    channels: int
    image_token_id: int
    vision_start_id: int | None = None
    vision_end_id: int | None = None
    video_token_id: int | None = None

    @property
    def token_ids(self) -> list[int]:
        """The tokens of images and videos: the placeholders, and the tokens before and after the placeholders."""
        tokens = (self.image_token_id, self.vision_start_id, self.vision_end_id, self.video_token_id)
        return [token for token in tokens if token is not None]

    @property
    def group_size(self) -> int:
        """Width and height in pixels of the part of an image that one output of the tower describes."""
        return self.patch_size * self.merge_size

    @property
    def item_width(self) -> int:
        """Number of values of one item, which contains the pixels of one group of patches."""
        return self.group_size**2 * self.channels * self.temporal_patch_size
