"""List every causal language model of transformers: those that can be exported, and why the others cannot.

Found by exporting and checking a random checkpoint of each; see tests/export/test_families.py.
"""

_WORKS = """
    afmoe apertus apertus1p5_text arcee aria_text axk1 beam biogpt bitnet bloom codegen cohere cohere2
    cohere2_moe cohere_compass_text ctrl cwm deepseek_v2 deepseek_v3 diffllama doge dots1 ernie4_5
    ernie4_5_moe exaone exaone4 exaone_moe falcon flex_olmo flint gemma gemma2 gemma3_text gemma3n_text gemma4_text
    gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox
    gpt_neox_japanese gpt_oss gptj granite granite_swa granitemoe granitemoe_swa granitemoeshared helium
    hunyuan_v1_dense hunyuan_v1_moe hy_v3 internlm3 iquestcoder jais2 kolibri1 laguna llama llama4_text mellum minicpm3
    minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral modernbert-decoder mpt nanochat
    nemotron olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe sarvam_mla
    sarvam_moe seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma xglm youtu
"""

# Some of their layers keep a recurrent state, or all do; in the others a token has keys and values.
_RECURRENT = """
    bailing_hybrid bamba falcon_h1 granitemoehybrid kimi_linear lfm2 lfm2_moe lfm3 mamba2 minimax nemotron_h
    olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next zamba2
"""

# Decoders behind an encoder, which reads a source.
_BEHIND_SOURCES = """
    bart blenderbot blenderbot-small m2m_100 marian mbart mt5 pegasus plbart t5 umt5 whisper
"""

_REFUSED = {
    "its layers keep a state that is not one row of keys and values for each token": """
        axk2 blt deepseek_v32 deepseek_v4 dots3_note_text falcon_mamba glm_moe_dsa hy_v4
        inkling2_loop_text inkling2_text inkling_text jamba lara_mini mamba
        qwen4_exp_text recurrent_gemma rwkv xlstm zamba zaya
    """,
    "its keys and values differ in size": """
        longcat_flash mimo_v2_flash
    """,
    "a learned prompt stands before each text": """
        cpmant
    """,
    "transformers runs it without a cache of keys and values": """
        openai-gpt
    """,
    "it is an encoder, or a decoder that needs one": """
        bert bert-generation big_bird bigbird_pegasus camembert data2vec-text electra ernie megatron-bert moshi
        musicgen musicgen_melody mvp prophetnet reformer rembert roberta roberta-prelayernorm roc_bert roformer trocr
        xlm xlm-roberta xlm-roberta-xl xlnet xmod
    """,
    "it reads or writes more than text; a text-only checkpoint of it may have a type of its own": """
        dots3_note emu3 fuyu gemma4_assistant gemma4_unified_assistant git got_ocr2 hyperclovax mllama
        moss_transcribe_diarize phi4_multimodal qwen4_exp
    """,
    "its layers run several times for a token, each time with keys and values of their own": """
        dory hrm_text
    """,
    "its experts are code of its own, with sizes that depend on the tokens": """
        dbrx jetmoe
    """,
}

RECURRENT_FAMILIES = tuple(_RECURRENT.split())
BEHIND_SOURCES = tuple(_BEHIND_SOURCES.split())
WORKS = tuple(sorted((*_WORKS.split(), *RECURRENT_FAMILIES, *BEHIND_SOURCES)))
REFUSED = {kind: reason for reason, kinds in _REFUSED.items() for kind in kinds.split()}
