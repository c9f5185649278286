"""The Kubernetes example: each variant is built, and checked against the schemas of Kubernetes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from kvstore.config import Config, DiskConfig

PLACE = Path(__file__).resolve().parents[2] / "examples/kubernetes"
RELEASE = "1.30"


def documents(text: str) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(text) if each is not None]


def built(variant: str) -> dict[str, dict[str, Any]]:
    """What `kubectl apply -k` would send, by kind."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    told = subprocess.run(
        ["kubectl", "kustomize", str(PLACE / variant)], capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stderr
    found = {each["kind"]: each for each in documents(told.stdout)}
    for each in found.values():
        kubernetes_validate.validate(each, RELEASE, strict=True)
    return found


def test_the_schemas_find_a_mistake() -> None:
    service = documents((PLACE / "base/service.yaml").read_text())[0]
    kubernetes_validate.validate(service, RELEASE, strict=True)
    service["spec"]["port"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(service, RELEASE, strict=True)


@pytest.mark.parametrize(
    ("variant", "volume", "kinds"),
    [
        ("base", "emptyDir", set()),
        ("hostpath", "hostPath", set()),
        ("pvc", "persistentVolumeClaim", {"PersistentVolumeClaim"}),
    ],
)
def test_each_variant_is_valid_and_mounts_its_disk(
    variant: str, volume: str, kinds: set[str]
) -> None:
    found = built(variant)
    assert set(found) == {"Deployment", "Service", "ConfigMap", *kinds}
    pod = found["Deployment"]["spec"]["template"]["spec"]
    (kv,) = (each for each in pod["volumes"] if each["name"] == "kv")
    assert set(kv) == {"name", volume}
    (container,) = pod["containers"]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    said = json.loads(found["ConfigMap"]["data"]["kv-transfer-config.json"])
    config = Config.from_mapping(said["kv_connector_extra_config"])
    (tier,) = config.tiers
    assert isinstance(tier, DiskConfig)
    assert tier.paths[0].is_relative_to(mounts["kv"])
    assert config.control is not None
    assert Path(config.control).is_relative_to(mounts["control"])
    # The configuration arrives by the name that kustomize gives its map.
    (named,) = (each for each in container["env"] if each["name"] == "KV_TRANSFER_CONFIG")
    reference = named["valueFrom"]["configMapKeyRef"]
    assert reference["name"] == found["ConfigMap"]["metadata"]["name"]
    timeout = next(int(word.partition("=")[2]) for word in container["args"] if "shutdown" in word)
    assert config.shutdown_timeout_s < timeout < pod["terminationGracePeriodSeconds"]


def test_the_image_copies_what_make_dist_leaves() -> None:
    text = (PLACE / "Containerfile").read_text()
    assert re.search(r"^COPY dist/kvstore_offload-\*\.whl ", text, re.MULTILINE)
    makefile = (PLACE.parents[1] / "Makefile").read_text()
    assert "repair -w dist dist/raw/*.whl" in makefile
