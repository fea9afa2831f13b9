"""Mistakes in settings, and in the files of the service; see `mistakes_in_files`."""

from tests.cluster.cli.mistakes_in_files import drafting, mistake

# device and memory


@mistake(r"device is 'cuda'; it must be cpu or auto, as torch finds no GPU")
def no_gpu(place):
    return [place.tiny, "--device", "cuda"]


@mistake(r"device is 'cuda'; it must be cpu or auto, as torch finds no GPU")
def no_gpu_for_an_alias(place):
    return ["smollm2-135m-instruct", "--device", "cuda"]


@mistake(r"max_model_len is 4096; it must be from 2 to 512")
def a_context_beyond_the_models(place):
    return [place.tiny, "--max-model-len", "4096"]


@mistake(r"one sequence of max_model_len needs 12288\.0: raise kv_cache_memory_gib or lower")
def a_context_beyond_the_cache(place):
    model = place.config(place.copy(), max_position_embeddings=2**30)
    return [model, "--max-model-len", str(2**24), "--kv-cache-memory-gib", "1"]


@mistake(r"GiB are free; the KV cache has 100000\.0 of them: lower kv_cache_memory_gib")
def a_cache_beyond_the_memory(place):
    return [place.tiny, "--kv-cache-memory-gib", "100000"]


@mistake(r"quantization is 'int4'; it must be left out, int8 or w8a8 on a CPU")
def a_quantization_of_gpus(place):
    return [place.tiny, "--quantization", "int4", "--device", "cpu"]


@mistake(r"quantization is 'awq'; .* the model has no quantized weights")
def a_quantization_that_files_do_not_have(place):
    return [place.tiny, "--quantization", "awq"]


@mistake(r"tensor_parallel_size is 900; it must be from 1 to \d")
def more_ranks_than_cores(place):
    return [place.tiny, "--tensor-parallel-size", "900"]


@mistake(r"draft_tensor_parallel_size is 900; it must be")
def more_draft_ranks_than_cores(place):
    keys = {"method": "draft_model", "model": str(place.tiny), "draft_tensor_parallel_size": 900}
    return [place.tiny, *drafting(**keys)]


# flags and files of the service


@mistake(r"[Nn]o such option '--max-model-length'.*--max-model-len")
def an_unknown_flag(place):
    return [place.tiny, "--max-model-length", "128"]


@mistake(r"pipeline_parallel_size is 2; .* set tensor_parallel_size")
def a_refused_flag_of_vllm(place):
    return [place.tiny, "--pipeline-parallel-size", "2"]


@mistake(r"max_num_seqs is -1; it must be a whole number from 1")
def a_negative_limit(place):
    return [place.tiny, "--max-num-seqs", "-1"]


@mistake(r"'http' is not a valid integer")
def no_number(place):
    return [place.tiny, "--http-port", "http"]


@mistake(r"cannot listen on 203\.0\.113\.7:\d+ \(grpc_port\)")
def a_host_of_another_machine(place):
    return [place.tiny, "--host", "203.0.113.7"]


@mistake(r"chat_template is .* an existing file")
def no_template(place):
    return [place.tiny, "--chat-template", place.tmp / "missing.jinja"]


@mistake(r"chat_template is .* Jinja template \(")
def a_broken_template(place):
    path = place.tmp / "broken.jinja"
    path.write_text("{% for message in messages %}")
    return [place.tiny, "--chat-template", path]


@mistake(r"tls_key_file is .* an existing file")
def no_tls_key(place):
    certificate = place.tmp / "cert.pem"
    certificate.touch()
    files = ["--tls-cert-file", certificate, "--tls-key-file", place.tmp / "key.pem"]
    return [place.tiny, *files]


@mistake(r"tls_key_file .* together with tls_cert_file")
def a_certificate_without_key(place):
    (place.tmp / "cert.pem").touch()
    return [place.tiny, "--tls-cert-file", place.tmp / "cert.pem"]


@mistake(r"tls_cert_file is .* a certificate in PEM")
def an_empty_certificate(place):
    for name in ("cert.pem", "key.pem"):
        (place.tmp / name).touch(mode=0o600)
    files = ["--tls-cert-file", place.tmp / "cert.pem", "--tls-key-file", place.tmp / "key.pem"]
    return [place.tiny, *files]


@mistake(r"api_key_file is .* an existing file")
def no_key_file(place):
    return [place.tiny, "--api-key-file", place.tmp / "keys"]


@mistake(r"api_key_file is .* a YAML file with a list of keys")
def a_malformed_key_file(place):
    path = place.tmp / "keys"
    path.touch(mode=0o600)
    path.write_text("short\n")
    return [place.tiny, "--api-key-file", path]


@mistake(r"admin_token_file is .* an existing file")
def no_token_file(place):
    return [place.tiny, "--admin-token-file", place.tmp / "token"]


@mistake(r"serve\.yaml. does not exist")
def no_configuration_file(place):
    return ["--config", place.tmp / "serve.yaml"]


@mistake(r"must be a readable YAML file")
def a_configuration_that_is_no_yaml(place):
    path = place.tmp / "serve.yaml"
    path.write_text("model: [")
    return ["--config", path]


@mistake(r"unknown configuration key 'max_model_length'; did you mean max_model_len\?")
def an_unknown_setting(place):
    path = place.tmp / "serve.yaml"
    path.write_text(f"model: {place.tiny}\nmax_model_length: 3\n")
    return ["--config", path]
