"""List every type of transformers that writes text: those that can be exported, and why the others cannot.

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

# Decoders with an encoder, which reads a source.
_WITH_SOURCES = """
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
    "a learned prompt comes before each text": """
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
        apertus1p5 audioflamingo3 blip blip-2 chameleon cohere_compass cosmos3_edge cosmos3_omni deepseek_ocr2
        diffusion_gemma dots3_note emu3 ernie4_5_vl_moe evolla fast_vlm fun_asr_nano gemma4_assistant
        gemma4_unified_assistant git glm5_next glmga granite4_vision granite_docling granite_speech_plus
        hunyuan_vl hy_v4_vl hyperclovax hyperclovax_vision_v2 idefics inkling2 inkling2_loop inkling_mm_model
        instructblip instructblipvideo janus kosmos-2 kosmos-2.5 kyutai_speech_to_text lfm3_vl minicpm_ocr
        minicpmv4_6 minicpmv4_7 minimax_m3_vl mistral_large4 mllama molmo2 moss_transcribe_diarize
        muse_glimmer muse_spark musicflamingo nemo_speechlm nemotron_h_omni omniasr perception_lm
        phi4_multimodal pi0 pp_chart2table qwen2_5_omni qwen3_omni_moe qwen3_omni_moe_thinker qwen4_exp
        shieldgemma2 step3p7 unlimited_ocr vibevoice vibevoice_asr voxtral_realtime
    """,
    "its encoder, or the way in which its decoder asks it, is of a kind that is not exported": """
        canary cohere_asr dia encoder-decoder florence2 fsmt led longt5 moonshine moonshine_streaming nllb-moe pegasus_x
        pix2struct pop2piano pp_formulanet seamless_m4t seamless_m4t_v2 speech-encoder-decoder speech_to_text speecht5
        switch_transformers t5gemma t5gemma2 udop vision-encoder-decoder
    """,
    "what comes before a text is seen in both directions": """
        paligemma
    """,
    "its latent attention weighs queries by their positions (llama_4_scaling_beta)": """
        mistral4
    """,
    "its layers run several times for a token, each time with keys and values of their own": """
        dory hrm_text
    """,
    "its experts are code of its own, with sizes that depend on the tokens": """
        dbrx jetmoe
    """,
}

RECURRENT_FAMILIES = tuple(_RECURRENT.split())
WITH_SOURCES = tuple(_WITH_SOURCES.split())
WORKS = tuple(sorted((*_WORKS.split(), *RECURRENT_FAMILIES, *WITH_SOURCES)))
REFUSED = {kind: reason for reason, kinds in _REFUSED.items() for kind in kinds.split()}
