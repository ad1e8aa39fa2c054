"""Which of LMCache's tests run against our plugins, and which cannot and why.

For LMCache 0.5.6; paths are below its `tests/v1`.
"""

from __future__ import annotations

_DIST, _DISK = "distributed", "storage_backend"

#: Files in which some test makes an L2 adapter or a disk backend that can be ours.
FILES: tuple[str, ...] = (
    f"{_DIST}/test_mock_l2_adapter.py",
    f"{_DIST}/test_fs_l2_adapter_delete.py",
    f"{_DIST}/test_l2_adapter_factory.py",
    f"{_DIST}/test_store_controller.py",
    f"{_DIST}/test_prefetch_controller.py",
    f"{_DIST}/test_distributed_storage_manager.py",
    f"{_DIST}/test_runtime_adapters.py",
    f"{_DIST}/test_report_status.py",
    f"{_DIST}/test_multimodel.py",
    f"{_DIST}/test_multi_l1_serving.py",
    f"{_DIST}/test_devdax_l1_allocator.py",
    f"{_DIST}/test_l1_l2_state_metrics.py",
    f"{_DIST}/test_cache_salt_l2_eviction.py",
    f"{_DIST}/test_fault_inject_l2_adapter.py",
    f"{_DIST}/serde/test_serde_e2e.py",
    f"{_DIST}/serde/test_serde_fs_e2e.py",
    f"{_DISK}/test_local_disk_backend.py",
)

#: Files about our interfaces in which no test takes anybody's plugin -> why.
NO_PLACE: dict[str, str] = {
    "multiprocess/test_ext_server_module.py": "loads modules that it defines itself",
    f"{_DISK}/test_storage_plugin.py": "asserts what its own plugin class recorded",
    f"{_DISK}/test_local_disk_put_admission.py": "sets LocalDiskBackend's attributes",
    f"{_DIST}/test_l2_adapter_base.py": "tests the base class over a stub of its own",
    f"{_DIST}/test_lru_eviction_policy.py": "asserts the order of LRU",
    f"{_DIST}/test_arc_eviction_policy.py": "asserts the order of ARC",
    f"{_DIST}/test_isolated_lru_eviction_policy.py": "asserts the order of IsolatedLRU",
    "test_cache_policy.py": "asserts the orders of the in-process mode's policies",
    "test_impl_completeness.py": "names the classes that it looks at",
    "test_cache_engine.py": "needs a CUDA device",
}

_ATTRIBUTES = "reads or sets attributes that only LocalDiskBackend has"
_FILES = "looks for LMCache's own file names on disk"
_SHARDS = "spreads one tier over several paths: LocalDiskBackend's own feature"

#: (end of the file's name, test) -> why it cannot run against a plugin.
_CANNOT: dict[tuple[str, str], str] = {
    (
        "test_report_status.py",
        "test_report_status_shape_with_l2",
    ): "asserts the mock adapter's own type name",
    (
        "test_multi_l1_serving.py",
        "test_fixed_affinity_loads_into_nondefault_l1",
    ): _FILES,
    (
        "test_serde_fs_e2e.py",
        "test_write_serialize_clear_prefetch_deserialize",
    ): _FILES,
    **{
        ("test_local_disk_backend.py", name): _SHARDS
        for name in (
            *("test_init_multi_path", "test_gpu_affinity_selects_path"),
            *("test_all_directories_created", "test_single_path_backward_compat"),
            *("test_path_sharding_default", "test_path_sharding_explicit_by_gpu"),
            "test_path_sharding_unsupported_raises",
            "test_cpu_dst_device_defaults_to_first_path",
        )
    },
    **{
        ("test_local_disk_backend.py", name): _ATTRIBUTES
        for name in (
            *("test_init", "test_init_with_lookup_server_and_worker", "test_str"),
            *("test_key_to_path", "test_no_phantom_hit_when_load_fails"),
            "test_updates_cache_policy_on_successful_load",
            "test_key_absent_returns_none_without_policy_update",
            *("test_reads_match_written_data", "test_mixed_hit_and_miss"),
            "test_cache_policy_updated_only_for_hits",
            "test_concurrent_reads_use_multiple_threads",
            "test_already_stored_key_is_not_rewritten",
        )
    },
}


def reason_not_to_run(nodeid: str) -> str | None:
    """Why a test, named as pytest does, cannot run; None: it is to pass."""
    path, _, rest = nodeid.partition("::")
    test = rest.rpartition("::")[2].partition("[")[0]
    return _CANNOT.get((path.rpartition("/")[2], test))
