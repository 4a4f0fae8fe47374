"""The conformance suite of hp-fsdp: `pytest --pyargs hp_fsdp.testing.conformance --hp-platform=NAME`.

`test_storage` asks for each method of `hp_fsdp.ParameterStorage` alone, in the order in which to write them.
`test_training` trains under `fully_shard` and compares with one device. Run the suite of hp-dtensor first.
"""
