/* The function that Rust's standard library takes random bytes from. Windows has it since 7, Wine since 9. */

#include <stddef.h>

/* RtlGenRandom of advapi32, under the name that it is exported by. */
__declspec(dllimport) unsigned char __stdcall SystemFunction036(void *buffer, unsigned long length);

__declspec(dllexport) int ProcessPrng(unsigned char *data, size_t length)
{
    while (length > 0) {
        unsigned long piece = length < (1u << 20) ? (unsigned long)length : 1u << 20;
        if (!SystemFunction036(data, piece))
            return 0;
        data += piece;
        length -= piece;
    }
    return 1;
}
