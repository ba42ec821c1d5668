"""The model family of this run alone, for SGLang's registry (SGLANG_EXTERNAL_MODEL_PACKAGE).

Imported by SGLang's processes on the CPU. By itself the registry imports all 150 families, which
takes three seconds of a core. It imports them still where it does not find here what it looks for.
"""
