/* Completes a text: ask BUNDLE TEXT */
#include <qhexrt_c.h>
#include <stdio.h>

int main(int argc, char **argv) {
    qhx_runtime *runtime = qhx_runtime_create(NULL, NULL);
    qhx_session *session = argc == 3 ? qhx_session_create(qhx_model_load(runtime, argv[1], NULL)) : NULL;
    qhx_inputs inputs = {.text = argv[2], .no_template = 1};
    qhx_gen_cfg cfg;
    qhx_gen_cfg_default(&cfg);
    cfg.max_new_tokens = 12;
    qhx_output output;
    if (qhx_generate(session, &inputs, &cfg, NULL, NULL, &output) != QHX_OK) return 1;
    return fputs(output.text, stdout) < 0;
}
