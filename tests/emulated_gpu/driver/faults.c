/* Who touches device memory by mistake is told so, before the process ends as for any fault.
 *
 * Others take the signal for themselves, as Python's faulthandler; so each kernel, which may need it
 * (see [Note: opening]), makes sure that it comes here first. */
#define _GNU_SOURCE
#include "driver.h"
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

static struct sigaction BEFORE;

static void explain(uintptr_t address) {
    char text[256];
    range_t range = range_of((void *)address);
    int length =
        range.kind == DEVICE
            ? snprintf(
                  text, sizeof text,
                  "emulated GPU: the host touched device memory: byte %zu of %zu that were "
                  "allocated at %p of device %d. A device pointer was taken for one of the host\n",
                  (size_t)(address - range.base), range.size, (void *)range.base, range.device)
            : snprintf(text, sizeof text,
                       "emulated GPU: %p was touched, an address of a device at which nothing is "
                       "allocated: it was freed, or lies behind the end of what was\n",
                       (void *)address);
    if (write(2, text, (size_t)length) != length) return;
}

static void on_fault(int signal, siginfo_t *info, void *machine) {
    static bool told;
    (void)machine;
    uintptr_t address = (uintptr_t)info->si_addr, first = (uintptr_t)1 << 44;
    uintptr_t shift = (uintptr_t)emulated_view((void *)first) - first;
    if (is_device_address(address)) {
        if (is_in_kernel() && open_for_kernel(address)) return;
        explain(address);
    } else if (is_device_address(address - shift)) {
        explain(address - shift);
    }
    /* The same instruction meets the handler before this one, which may bring it here again. */
    sigaction(signal, told ? &(struct sigaction){.sa_handler = SIG_DFL} : &BEFORE, NULL);
    told = true;
}

void watch_faults(void) {
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER};
    struct sigaction now;
    if (sigaction(SIGSEGV, NULL, &now) || now.sa_sigaction == on_fault) return;
    BEFORE = now;
    sigaction(SIGSEGV, &action, NULL);
}
