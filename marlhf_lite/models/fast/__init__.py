"""Everything that only makes a model faster; one switch, `--fast`, takes the plain path of transformers and PEFT."""
