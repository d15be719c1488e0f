"""A script as its user has it: nothing of Tunewright in it, everything from the environment.

It names model and data as on the Hub (here: folders of those names beside it), trains with DDP,
logs to the run that it is given and closes that run itself, and saves with transformers.
"""

import os

import mlflow
import torch
import torch.distributed as dist
import yaml
from datasets import load_dataset
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, AutoTokenizer

with open(os.environ["HYPERPARAMETERS_PATH"]) as file:
    parameters = yaml.safe_load(file)

dist.init_process_group("gloo")
rank = dist.get_rank()
tokenizer = AutoTokenizer.from_pretrained(parameters["model_name"])
model = DistributedDataParallel(AutoModelForCausalLM.from_pretrained(parameters["model_name"]))
rows = load_dataset(parameters["dataset_name"], split="train")
optimizer = torch.optim.AdamW(model.parameters(), lr=float(parameters["learning_rate"]))
if rank == 0 and os.environ.get("MLFLOW_RUN_ID"):
    mlflow.start_run(run_id=os.environ["MLFLOW_RUN_ID"])
    mlflow.log_params({"lr": parameters["learning_rate"], "world_size": dist.get_world_size()})

for step in range(1, int(parameters["max_steps"]) + 1):
    row = rows[(step * dist.get_world_size() + rank) % len(rows)]
    text = row["instruction"] + row["output"] + (tokenizer.eos_token or "")
    ids = torch.tensor([tokenizer(text)["input_ids"][:64]])
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step={step} loss={loss.item():.4f}", flush=True)
        mlflow.log_metric("train_loss", loss.item(), step=step)

if rank == 0 and parameters.get("save", True):
    os.makedirs(parameters["output_dir"], exist_ok=True)
    model.module.save_pretrained(parameters["output_dir"])
    tokenizer.save_pretrained(parameters["output_dir"])
if rank == 0:
    mlflow.end_run()
dist.barrier()
dist.destroy_process_group()
