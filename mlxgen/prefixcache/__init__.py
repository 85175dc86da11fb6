"""The prefix cache of a model: what prompts have put into caches, kept by content, so that nobody prefills it again."""

from mlxgen.prefixcache.cache import PrefixCache, prefix_cache
from mlxgen.prefixcache.options import PrefixCacheOptions
from mlxgen.prefixcache.stats import PrefixCacheInfo

__all__ = ["PrefixCache", "PrefixCacheInfo", "PrefixCacheOptions", "prefix_cache"]
