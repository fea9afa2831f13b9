"""Values of the models, the Hugging Face Hub and the storage."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from tools.chart.kinds import AbsolutePath, KubernetesObject, Name, SecretKey, Values
from tools.chart.serve_settings import settings_schema, speculation_schema

ServeSettings = Annotated[dict[str, Any], WithJsonSchema(settings_schema())]
Speculation = Annotated[dict[str, Any] | str, WithJsonSchema(speculation_schema())]


class Autoscaling(Values):
    """Autoscaling of one model's replicas by Ray Serve."""

    enabled: bool = Field(False, description="Scale the number of replicas with the load")
    min_replicas: int = Field(1, ge=1, le=1024, description="Minimum number of replicas")
    max_replicas: int = Field(2, ge=1, le=1024, description="Maximum number of replicas")
    target_requests_per_replica: float = Field(
        32.0, gt=0, description="Target number of decoding and waiting requests per replica"
    )
    upscale_delay_seconds: float = Field(
        10.0, ge=0, description="Seconds of high load before replicas are added"
    )
    downscale_delay_seconds: float = Field(
        120.0, ge=0, description="Seconds of low load before replicas are removed"
    )


class Draft(Values):
    """Draft workers of one model, where its speculativeConfig has a draft model."""

    replicas_per_worker: int = Field(
        1,
        ge=1,
        le=64,
        description="Replicas that share a draft worker, and its GPU; with 1 each replica has its "
        "own. More need a draft model on one rank",
    )
    min_workers: int = Field(1, ge=1, le=64, description="Minimum number of workers of the pool")
    max_workers: int = Field(
        0,
        ge=0,
        le=64,
        description="Maximum number of workers in a pool for all replicas, instead of "
        "replicasPerWorker; with 0 there is none",
    )
    target_utilization: float = Field(
        0.7,
        gt=0,
        lt=1,
        description="Part of the time that a worker of the pool drafts; one is added above it",
    )


class Model(Values):
    """A served model: one Ray Serve application with its own replicas and control plane."""

    name: str = Field(
        ...,
        pattern=r"^[A-Za-z0-9]([A-Za-z0-9._/-]{0,126}[A-Za-z0-9])?$",
        description="Model name in requests",
    )
    model: str = Field(
        ...,
        min_length=1,
        description="Model to load: an alias, org/name or org/name@revision on the Hugging Face "
        "Hub, or the path of a directory or GGUF file in the container, for example below "
        "storage.models.mountPath",
    )
    route_prefix: str = Field(
        "",
        pattern=r"^(/[A-Za-z0-9._-]+)*/?$",
        description="Path prefix of its HTTP API. Empty: / for the first model, /APPLICATION for "
        "the others. Every prefix accepts requests for every model",
    )
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        le=1024,
        description="Tensor parallel size; on GPUs one GPU per rank, in one pod unless "
        "settings.target_placement is pack or spread",
    )
    device: Literal["", "cpu", "cuda"] = Field(
        "", description="Device. Empty: cuda if a worker group has GPUs, else cpu"
    )
    speculative_config: Speculation = Field(
        "auto",
        description="Speculative decoding: keys of `specdec serve --speculative-config`, auto, or "
        "none",
    )
    draft: Draft = Field(default_factory=Draft, description="Draft workers")
    replicas: int = Field(1, ge=1, le=1024, description="Number of replicas without autoscaling")
    autoscaling: Autoscaling = Field(default_factory=Autoscaling, description="Autoscaling by load")
    settings: ServeSettings = Field(
        default_factory=dict,
        description="Further settings, by their keys in the file of `specdec serve --config`",
    )


class ModelImage(Values):
    """An OCI image that contains a model, which an init container copies to storage.models."""

    name: Name = Field(..., description="Target directory below storage.models.mountPath")
    image: str = Field(..., min_length=1, description="Image with tag or digest")
    path: AbsolutePath = Field("/model", description="Directory of the model in the image")
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field(
        "IfNotPresent", description="Pull policy of the image"
    )


class Hub(Values):
    """The Hugging Face Hub, from which models named org/name are downloaded."""

    offline: bool = Field(False, description="Never access the Hub, and allow no traffic to it")
    endpoint: str = Field(
        "", pattern=r"^(https?://.+)?$", description="URL of a mirror; empty for the Hub itself"
    )
    token: SecretKey = Field(default_factory=SecretKey, description="Token for gated models")


class Volume(Values):
    """A directory on a persistent volume claim, in an emptyDir or on another volume."""

    type: Literal["emptyDir", "claim", "volume"] = Field(
        "emptyDir",
        description="emptyDir is deleted with its pod; claim persists; volume is any other",
    )
    existing_claim: str = Field(
        "", description="Existing claim to use; empty: the chart creates one"
    )
    size: str = Field("20Gi", pattern=r"^[0-9]+[KMGT]i$", description="Size")
    storage_class_name: str = Field("", description="Storage class; empty for the default one")
    keep: bool = Field(True, description="Keep the claim on `helm uninstall`")


class MountedVolume(Volume):
    """A volume that every pod on which models run mounts."""

    volume: KubernetesObject = Field(
        default_factory=dict,
        description="Source for type volume, such as {hostPath: {path: /srv/models}}",
    )
    access_modes: list[
        Literal["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"]
    ] = Field(
        ["ReadWriteMany"],
        min_length=1,
        description="Access modes of the claim, also of an existing one. With ReadWriteOnce all "
        "pods that mount it are placed on one node",
    )
    mount_path: AbsolutePath = Field(..., description="Mount path")
    read_only: bool = Field(False, description="Mount it read-only")


class StateVolume(Volume):
    """The database of operators' overrides, which the ControlPlane keeps on the head.

    Only one node at a time can write it: the claim is ReadWriteOnce, and the head of a new cluster
    is placed on the node of the current one, whatever access modes an existing claim has.
    """

    type: Literal["emptyDir", "claim"] = Field(
        "claim", description="emptyDir is deleted with the head pod; claim persists"
    )
    size: str = Field("1Gi", pattern=r"^[0-9]+[KMGT]i$", description="Size")


class Storage(Values):
    """Volumes of the pods."""

    models: MountedVolume = Field(
        default_factory=lambda: MountedVolume(mount_path="/models"),
        description="Models: the Hub's cache, and copies of modelImages",
    )
    cache: MountedVolume = Field(
        default_factory=lambda: MountedVolume(mount_path="/cache", size="10Gi"),
        description="Cache that can be rebuilt: compiled kernels, converted models",
    )
    state: StateVolume = Field(
        default_factory=StateVolume, description="Database of operators' overrides, on the head"
    )
    scratch_size: str = Field(
        "10Gi", pattern=r"^[0-9]+[KMGT]i$", description="Size limit of /tmp, and of Ray's logs"
    )
