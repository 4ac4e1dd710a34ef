"""Names of files and folders with the shards of several processes, without an import of torch."""

METADATA = ".metadata"  # beside the shards of several processes
# the weights in a checkpoint of SFT or reward model, as Trainer names them
TRAINER_SHARDS = "pytorch_model_fsdp_0"
