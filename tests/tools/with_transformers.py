"""transformers: the process group is there before TrainingArguments, which take it as it is."""

import sys
import tempfile

import torch
from problem import tell
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import hpcdist.torch  # noqa: F401

torch.distributed.init_process_group(sys.argv[1])

torch.manual_seed(7)
config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2)
rows = torch.randint(32, (48, 16))

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        max_steps=8,
        per_device_train_batch_size=4,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=4,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        GPT2LMHeadModel(config),
        arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        eval_dataset=[{"input_ids": row, "labels": row} for row in rows[:10]],
    )
    trainer.train()

history = trainer.state.log_history
assert trainer.args.world_size == torch.distributed.get_world_size() > 1
assert torch.distributed.get_backend() == sys.argv[1]
tell(
    losses=[each["loss"] for each in history if "loss" in each],
    evaluated=[each["eval_loss"] for each in history if "eval_loss" in each],
    norms=[each["grad_norm"] for each in history if "grad_norm" in each],
    weights=torch.cat([each.detach().flatten() for each in trainer.model.parameters()]),
)
torch.distributed.destroy_process_group()
