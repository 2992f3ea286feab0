from __future__ import annotations
import random, collections, traceback
import numpy as np
from edgekit.checkpoint import open_checkpoint
from edgekit.errors import EdgeKitError

def test_fuzz(tiny_gguf, tiny_llama, tmp_path):
    import shutil
    errs=collections.Counter(); ok=0
    base=bytearray(tiny_gguf("llama_llama3_rope","Q4_1").read_bytes())
    # find header end
    from edgekit.checkpoint.gguf_container import read_container
    end=min(t.offset for t in read_container(tiny_gguf("llama_llama3_rope","Q4_1")).tensors.values())
    rng=random.Random(0)
    out=tmp_path/"o"; out.mkdir()
    tok=base.index(b"tokenizer.ggml.tokens"); 
    for i in range(4000):
        b=bytearray(base)
        for _ in range(rng.choice([1,1,2,4])):
            r=rng.random()
            pos=rng.randrange(0,600) if r<.5 else (rng.randrange(end-2600,end) if r<.9 else rng.randrange(end))
            b[pos]=rng.choice([0,1,255,rng.randrange(256),b[pos]^(1<<rng.randrange(8))])
        p=tmp_path/"f.gguf"; p.write_bytes(b)
        try:
            with open_checkpoint(p) as c:
                for n in c.spec.tensor_shapes(): c.tensor(n)
                c.save_tokenizer(out)
            ok+=1
        except EdgeKitError: pass
        except Exception as e:
            key=traceback.format_exc().splitlines()[-3:]
            errs[tuple(key)]+=1
    print(ok); 
    for k,v in errs.items(): print(v,k)
    # safetensors + config
    errs.clear(); ok=0
    d=tmp_path/"d"; shutil.copytree(tiny_llama,d)
    for name in ("model.safetensors","config.json","generation_config.json","tokenizer_config.json"):
        base=(d/name).read_bytes()
        for i in range(600):
            b=bytearray(base)
            for _ in range(rng.choice([1,1,2,4])):
                pos=rng.randrange(min(len(b),2500)); b[pos]=rng.choice([0,34,48,57,255,rng.randrange(256),b[pos]^(1<<rng.randrange(8))])
            (d/name).write_bytes(b)
            try:
                with open_checkpoint(d) as c:
                    for n in c.spec.tensor_shapes(): c.tensor(n)
                    c.save_tokenizer(out)
                ok+=1
            except EdgeKitError: pass
            except Exception as e:
                key=traceback.format_exc().splitlines()[-3:]
                errs[tuple(key)]+=1
        (d/name).write_bytes(base)
    print(ok); 
    for k,v in errs.items(): print(v,k)
