/* What a group has that every call looks at. */
#include "group.h"
#include <structmember.h>

static PyTypeObject *GROUP_STATE;

static int group_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((group_t *)self)->transport);
    return 0;
}

static int group_clear(PyObject *self) {
    Py_CLEAR(((group_t *)self)->transport);
    return 0;
}

static void group_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    group_clear(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMemberDef MEMBERS[] = {
    {"transport", T_OBJECT, offsetof(group_t, transport), 0, NULL},
    {"issued", T_LONGLONG, offsetof(group_t, issued), 0, NULL},
    {"flight", T_UINT, offsetof(group_t, flight), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot SLOTS[] = {
    {Py_tp_members, MEMBERS},
    {Py_tp_traverse, group_traverse},
    {Py_tp_clear, group_clear},
    {Py_tp_dealloc, group_dealloc},
    {0, NULL},
};
static PyType_Spec SPEC = {"hpcdist.transport._kernel.GroupState", sizeof(group_t), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, SLOTS};

int is_group_type(PyTypeObject *type) { return PyType_IsSubtype(type, GROUP_STATE); }

int add_group(PyObject *module) {
    GROUP_STATE = (PyTypeObject *)PyType_FromSpec(&SPEC);
    if (!GROUP_STATE) return -1;
    return PyModule_AddObject(module, "GroupState", Py_NewRef((PyObject *)GROUP_STATE));
}
