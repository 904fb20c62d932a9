/* A plugin of QEMU that counts the instructions of a program and prints them to stderr when it ends.
 *
 * Built by cpu_instructions.py. The functions are those of QEMU's plugin interface, version 1:
 * https://www.qemu.org/docs/master/devel/tcg-plugins.html */

#include <inttypes.h>
#include <stdio.h>

typedef uint64_t plugin_id;
struct qemu_plugin_tb;

void qemu_plugin_register_vcpu_tb_trans_cb(plugin_id, void (*)(plugin_id, struct qemu_plugin_tb *));
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb *, int operation, void *, uint64_t);
void qemu_plugin_register_atexit_cb(plugin_id, void (*)(plugin_id, void *), void *);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *);

/* The only operation that is done inline. */
#define ADD_U64 0

int qemu_plugin_version = 1;

static uint64_t count;

static void translated(plugin_id id, struct qemu_plugin_tb *block)
{
    qemu_plugin_register_vcpu_tb_exec_inline(block, ADD_U64, &count, qemu_plugin_tb_n_insns(block));
}

static void ended(plugin_id id, void *unused)
{
    fprintf(stderr, "%" PRIu64 "\n", count);
}

int qemu_plugin_install(plugin_id id, const void *info, int argc, char **argv)
{
    qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
    qemu_plugin_register_atexit_cb(id, ended, NULL);
    return 0;
}
