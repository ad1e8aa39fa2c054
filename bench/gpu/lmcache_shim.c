/* LMCache 0.5.6's cuda_ops, built against a newer torch, wants this constructor;
   torch 2.11 has it inline only. It is the base class's, with another vtable. */
struct location {
    const char *function, *file;
    unsigned line;
};
#define ARGS "ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
void error(void *self, struct location at, void *text) __asm__("_ZN3c105ErrorC1" ARGS);
extern void *vtable[] __asm__("_ZTVN3c1019NotImplementedErrorE");
void not_implemented(void *self, struct location at, void *text)
    __asm__("_ZN3c1019NotImplementedErrorC1" ARGS);

void not_implemented(void *self, struct location at, void *text)
{
    error(self, at, text);
    *(void ***)self = vtable + 2;
}
