from .toy import LanguageModel, Model  # noqa: F401
