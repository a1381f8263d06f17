"""The grafted classes of every source family in the table, registered with transformers' Auto classes."""

from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM

from regraft.convert.mixers.registry import LazyMixers
from regraft.convert.model.factory import make_classes
from regraft.convert.spec import FAMILIES

# model_type of the source -> (config, base model, causal LM) of the grafted form
CLASSES: dict[str, tuple[type, type, type]] = {}

for _model_type in FAMILIES:
    _source = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[_model_type]]
    CLASSES[_model_type] = make_classes(_source, LazyMixers(), __name__)
    for _class in CLASSES[_model_type]:
        globals()[_class.__name__] = _class
    AutoConfig.register(CLASSES[_model_type][0].model_type, CLASSES[_model_type][0], exist_ok=True)
    AutoModel.register(CLASSES[_model_type][0], CLASSES[_model_type][1], exist_ok=True)
    AutoModelForCausalLM.register(CLASSES[_model_type][0], CLASSES[_model_type][2], exist_ok=True)
