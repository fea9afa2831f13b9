"""Values that say what is served."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from tools.chart.kinds import AbsolutePath, Name, SecretKey, Values
from tools.chart.serve_settings import settings_schema, speculation_schema

ServeSettings = Annotated[dict[str, Any], WithJsonSchema(settings_schema())]
Speculation = Annotated[dict[str, Any] | str, WithJsonSchema(speculation_schema())]


class Autoscaling(Values):
    """How Ray Serve follows the load of one model."""

    enabled: bool = Field(False, description="Whether the number of replicas follows the load")
    min_replicas: int = Field(1, ge=1, le=1024, description="Fewest replicas")
    max_replicas: int = Field(2, ge=1, le=1024, description="Most replicas")
    target_requests_per_replica: float = Field(
        32.0, gt=0, description="Decoding and waiting requests beyond which a replica is added"
    )
    upscale_delay_seconds: float = Field(
        10.0, ge=0, description="How long the load must call for more"
    )
    downscale_delay_seconds: float = Field(
        120.0, ge=0, description="How long the load must call for fewer"
    )


class Model(Values):
    """One model: one application of Ray Serve, with replicas and a control plane of its own."""

    name: str = Field(
        ...,
        pattern=r"^[A-Za-z0-9]([A-Za-z0-9._/-]{0,126}[A-Za-z0-9])?$",
        description="Name that requests use for it",
    )
    model: str = Field(
        ...,
        min_length=1,
        description="What to load: an alias, org/name or org/name@revision of the Hugging Face "
        "Hub, or the path of a directory or GGUF file in the container, below storage.models' "
        "mountPath say",
    )
    route_prefix: str = Field(
        "",
        pattern=r"^(/[A-Za-z0-9._-]+)*/?$",
        description="Path of its HTTP interface. Empty: / for the first model, /APPLICATION for "
        "the others. Requests for any model may go to any of them",
    )
    tensor_parallel_size: int = Field(
        1, ge=1, le=1024, description="Shards to divide it into; on GPUs one each, in one pod"
    )
    device: Literal["", "cpu", "cuda"] = Field(
        "", description="What it runs on. Empty: cuda where a worker group has GPUs, else cpu"
    )
    speculative_config: Speculation = Field(
        "auto",
        description="How to draft: keys as in `specdec serve --speculative-config`, auto, or none",
    )
    replicas: int = Field(1, ge=1, le=1024, description="Replicas, unless autoscaling is enabled")
    autoscaling: Autoscaling = Field(default_factory=Autoscaling, description="By load")
    settings: ServeSettings = Field(
        default_factory=dict,
        description="Further settings, by the names that `specdec serve --config` has for them",
    )


class ModelImage(Values):
    """An OCI image with a model, which an init container copies to storage.models."""

    name: Name = Field(..., description="Directory below storage.models.mountPath to copy to")
    image: str = Field(..., min_length=1, description="Image, with tag or digest")
    path: AbsolutePath = Field("/model", description="Directory of the model in the image")
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field(
        "IfNotPresent", description="When to pull it"
    )


class Hub(Values):
    """Where models come from that are named org/name."""

    offline: bool = Field(False, description="Never ask the Hub, and let no traffic out to it")
    endpoint: str = Field(
        "", pattern=r"^(https?://.+)?$", description="Mirror of the Hub; empty for the Hub itself"
    )
    token: SecretKey = Field(default_factory=SecretKey, description="Token for gated models")


class Volume(Values):
    """A directory, on a claim or for as long as its pod lives."""

    type: Literal["emptyDir", "claim"] = Field(
        "emptyDir", description="emptyDir ends with its pod; claim outlasts it"
    )
    existing_claim: str = Field("", description="Claim to use; empty for one of this release")
    size: str = Field("20Gi", pattern=r"^[0-9]+[KMGT]i$", description="Size of it")
    storage_class_name: str = Field("", description="Storage class; empty for the default one")
    keep: bool = Field(True, description="Whether `helm uninstall` leaves the claim")


class MountedVolume(Volume):
    """The same, with where it is mounted, by every pod on which models run."""

    access_modes: list[
        Literal["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"]
    ] = Field(
        ["ReadWriteMany"],
        min_length=1,
        description="Of the claim, existing ones too. With ReadWriteOnce all pods that mount it "
        "are placed on one node",
    )
    mount_path: AbsolutePath = Field(..., description="Where it is mounted")
    read_only: bool = Field(False, description="Whether nothing may be written there")


class StateVolume(Volume):
    """What operators have set, which the ControlPlane keeps on the head.

    A database, so one node's at a time: the claim is ReadWriteOnce, and the head of a new cluster
    is placed on the node of the present one, whatever modes an existing claim has.
    """

    type: Literal["emptyDir", "claim"] = Field(
        "claim", description="emptyDir ends with the head pod; claim outlasts it"
    )
    size: str = Field("1Gi", pattern=r"^[0-9]+[KMGT]i$", description="Size of it")


class Storage(Values):
    """What is kept, and where."""

    models: MountedVolume = Field(
        default_factory=lambda: MountedVolume(mount_path="/models"),
        description="Models: the Hub's cache, and what modelImages copy",
    )
    cache: MountedVolume = Field(
        default_factory=lambda: MountedVolume(mount_path="/cache", size="10Gi"),
        description="What can be made again: compiled kernels, converted models",
    )
    state: StateVolume = Field(default_factory=StateVolume, description="What operators have set")
    scratch_size: str = Field(
        "10Gi", pattern=r"^[0-9]+[KMGT]i$", description="Of /tmp, with Ray's logs"
    )
